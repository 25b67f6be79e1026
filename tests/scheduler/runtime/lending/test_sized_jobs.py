"""A job hands rollout nodes back because a router's loan serves it, and takes them again when that ends."""

from pathlib import Path

import pytest
from lending.lending_router import ADMIN_KEY
from lending.sizing import NUM_ASKED, POOLS, lending, lines, own_engines, submit, wait_nodes
from served_cluster import ServedCluster, wait_until

pytestmark = pytest.mark.slow


def test_nodes_go_back_while_the_routers_loan_serves_the_job_and_come_again_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROUTER_ADMIN_KEY", ADMIN_KEY)
    with (
        own_engines(NUM_ASKED) as engines,
        lending(tmp_path) as (router, own),
        ServedCluster(tmp_path, groups={}, pools=POOLS, router={"url": router.url}) as cluster,
    ):

        def wait_engines(num_nodes: int) -> None:
            wait_nodes(cluster, num_nodes)
            wait_until(lambda: sum(each.is_active for each in engines) == num_nodes, f"{num_nodes} engines")

        submit(cluster, engines)
        assert wait_nodes(cluster, NUM_ASKED)["iteration"] == 0
        wait_engines(1)
        job = cluster.job("a")
        assert "keeps 1 of the 4 rollout nodes that it asked for: with" in job["note"]
        assert job["serving_gpu_s"] > 0
        router.add(own)
        with cluster.held(0, "b"):
            borrow = {"run_id": "run-b", "model": "scripted"}
            cluster.submit("b", borrow=borrow, group=None, train_s=1e-5, slo=1.01, iterations=1)
            wait_until(lambda: cluster.job("a")["serving_gpus"] == 0, "b to borrow what a had")
            wait_engines(NUM_ASKED)
            assert cluster.job("a")["note"].endswith("it is lent no serving GPUs any more")
        cluster.wait_state("b", "done")
        router.remove(own)
        wait_engines(1)
        found = lines(cluster)
        assert [each["iteration"] for each in found] == list(range(len(found))), "none lost, none twice"
        assert {each["attempt"] for each in found} == {1}
