"""Runs whole RL jobs on shared nodes: phases under permits, the control channel, the scheduler's process."""
