"""A GPU that doesn't exist: a discrete-event twin of one serving and one rollout engine.

Owns modelled engines and their clock. Promises that everything which decides is the shipped object
(ServingDeadlines, GatePolicy, OnlineStepTime, the profile's fit), that gated workloads never overlap, and the
same outcome for the same seed. Never measures anything: its figures are simulated and say so.
"""
