"""A sleeping job of two ranks, whose launcher does not notice that a rank has died.

``forking_job.py FOLDER ROLLOUT_S TRAIN_S``. Each rank writes its pid into FOLDER/rank-NUMBER.
"""

import os
import runpy
import sys
from pathlib import Path

NUM_RANKS = 2

pids = []
for rank in range(NUM_RANKS):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
        draft = Path(sys.argv[1]) / f"rank-{rank}.new"
        draft.write_text(str(os.getpid()))
        draft.rename(draft.with_suffix(""))
        runpy.run_path(str(Path(__file__).with_name("sleeping_job.py")), run_name="__main__")
        os._exit(0)
    pids.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
