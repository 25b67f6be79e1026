"""Serving-first compute: when a rollout engine may take a step on a GPU that serves traffic.

Contains the step-time model, the SLO deadlines, the gate's policy, and the shared board through which the two
engines share the GPU's time. Nothing here imports vllm or torch, or touches memory slabs.

The serving engine's scheduler, around each step:
    deadlines.arrived / produced / finished; view = deadlines.view(now, model, has_work=...)
    side.publish(view); if policy.may_yield(now, view): side.offer_grants(view.latest_start_s, handover_s)
    side.begin_step() ... the step ... side.end_step(view)
The rollout engine's:
    side.set_want(has_requests, shortest_step_s); side.wait_grant(); view = side.view()
    decision = policy.decide(now, view, candidate, model)
    refused: side.decline(view, decision.reason)
    admitted: side.try_begin(now + decision.step_s, view) ... the step ... side.end_step(num_tokens)
"""
