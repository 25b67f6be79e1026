"""Why the simulation's numbers differ from the paper's: bench_e2e prints them as notes below its table.

Owns these sentences.
"""

DRAWN = "This is an input: the demands of 50 steps are drawn up to the paper's maximum."
HOUR = "Ours is one hour of a trace, the paper's a whole day."
WINDOWS = (
    "Ours is the median of all windows of five minutes. The paper shows three, with 4.22, 1.58 and 1.73."
)
BUSY = "Ours is the time in which serving computes at all. The paper counts busy SMs, which is less."
FITTED = "Step times were fitted to this table, but with other trajectories and other serving traffic."
SPOT_OVERHEAD = "This is an input: it sets how often spot GPUs come and go."
ACTIVATION = "Ours is one activation over a few steps, the paper's over a whole training."
NO_SHORTAGE = "Serving's KV memory never runs short at this traffic, which it does in the paper."
RELOAD = "Our autoscaler packs serving on few GPUs ahead of time, and turns keep their tokens."
NO_PREFIXES = "Prefixes are computed again, as in the paper, but without a gate rollouts get more of the GPU."
STATIC = f"Ours keeps a prefix cache in its half, and has no gate. {NO_SHORTAGE}"
ONE_ENGINE = f"One engine does both phases here and is busy a third of the time. {NO_SHORTAGE}"
RIGHT_SIZING = (
    "The paper has no such figure: its jobs keep their own GPUs. A rollout node is one engine here, and the "
    "job is alone in its group, with rollouts and training in turns."
)
DOLLARS = (
    "The paper has no such figure. Training GPUs count on both sides, and the longest trajectories bound "
    "what rollout GPUs save."
)
SHARE = (
    "The paper says more than 70%. Training computes on the trajectories' own tokens here; beside it "
    "stands the share if each is padded to 32k tokens, as ROLL's documentation calls typical."
)
TAIL = "This is an input: the number of turns was fitted to it, and to the seconds in §4.1."
PROMPTS = "A turn's whole history counts as prompt tokens here. The paper does not say how it counts."
CACHE = (
    "A lost prefix costs 60 microseconds a token here, and decoding takes most of the time. The paper "
    "does not give the rate of its prefills."
)
OWN = (
    "The paper gives the tail of these trajectories but not their tokens, and does not say how many GPUs "
    "its shorter time had. Here they are 16."
)
TRANSFER = (
    "Ours is arithmetic: our codec sends 1.2 bytes for a changed element, and rates are those of one CPU "
    "core a GPU. The paper's is measured, with the COO format, which takes 6 bytes."
)
DENSE = (
    "Ours is arithmetic at the link's full speed, which takes 2.6 s for all weights. The paper measures "
    "how long its relay takes."
)
GATE = (
    "The longest trajectories (§2.2) bound what more GPUs save. The default gate spends no SLO slack, the "
    "paper's does; its gain is beside ours."
)
LENT = (
    "The longest trajectory takes over 400 s (§4.1) and bounds what more GPUs save. The paper's own 607 s "
    "(Fig. 1c) over 1.69 would be less than these 400 s."
)
DEMAND = (
    "The paper states only the largest demand of a DAPO step, 5.7 times the batch. Ours is drawn up to "
    "it, evenly in its logarithm. The default gate spends no SLO slack; with it, the gain is beside ours."
)
ASYNCHRONOUS = (
    "Generation never waits here, neither for new weights nor for a limit of staleness, so its rate "
    "follows the number of GPUs. The paper states no such limit."
)
LARGEST = "Ours is the largest gain among a few steps, the paper's among 25 to 100."
FUNCTIONS = (
    "The end of a lease costs 26.1% of its time here (Fig. 8b). That functions find no GPU when many jobs "
    "ask for one (§2.3) is not simulated."
)
SPOT = (
    "The paper's numbers of spot GPUs are only drawn (Fig. 13). Ours are uniform between none and the "
    "most, and change as often as the overhead in Fig. 8b implies."
)
ELASTIC = (
    "Ours is against the better of both baselines, the paper's against RLBoost+. Rented GPUs compute for "
    "rollouts alone, and serving takes its part of lent ones."
)
SECONDS = (
    "The paper's is at a checkpoint in the middle of a training. Ours are trajectories of first steps "
    "(§2.2), which end sooner."
)
RECOVERY = (
    "Recovery is taken from this figure, but the paper's share is of its worse model, and ours counts the "
    "job's own GPUs too."
)
