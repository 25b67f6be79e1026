"""lm-eval, unmodified, at an endpoint: its tasks, its command and what it found."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

RUN_S = 600.0
_DOCS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
doc_to_text: "{{{{asked}}}}"
"""
_TASKS = {
    "generated": """
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["never"], temperature: 0.0, max_gen_toks: 40}}
metric_list: [{{metric: exact_match}}]
""",
    "scored": """
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
""",
}


def lm_eval_results(
    url: str, model: str, tokenizer: Path, folder: Path, docs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Returns the figures of each task, and its answers as `samples`. `docs`: the questions of each task.

    A chat endpoint is asked with messages, any other with token ids. `scored` tasks ask for the
    log-probabilities of given answers.
    """
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (CONTRIBUTING.md)")
    folder.mkdir(exist_ok=True)
    for name, each in docs.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(doc)}\n" for doc in each))
        (folder / f"{name}.yaml").write_text((_DOCS + _TASKS[name]).format(name=name, folder=folder))
    is_chat = url.endswith("/chat/completions")
    argv = [
        *(sys.executable, "-m", "lm_eval", "run", "--tasks", *docs, "--include_path", str(folder)),
        *("--model", "local-chat-completions" if is_chat else "local-completions"),
        *("--model_args", f"model={model},base_url={url},tokenizer={tokenizer},num_concurrent=4"),
        *("--output_path", str(folder / "found"), "--log_samples"),
        *(("--apply_chat_template",) if is_chat else ()),
    ]
    paths = {"HF_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **paths, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "any"}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (found,) = (folder / "found").rglob("results_*.json")
    results: dict[str, dict[str, Any]] = json.loads(found.read_text())["results"]
    for name in docs:
        (samples,) = (folder / "found").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        results[name]["samples"] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return results
