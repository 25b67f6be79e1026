"""What `rose serve --fine-tune` takes and refuses before anything is started."""

import json
from pathlib import Path

import pytest

from rose.arguments import run_command
from rose.errors import ConfigError
from rose.node import serve
from rose.node.fine_tune.examples import Example, Preference, Prompt, read_examples, read_prompts
from rose.node.fine_tune.options import (
    FineTuneOptions,
    check,
    check_memory,
    check_output,
    check_reward,
    check_space,
    take_options,
)


def test_texts_and_pairs_are_read_and_empty_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a b"}\n\n{"prompt": "q", "completion": "a"}\n')
    assert read_examples(path) == [
        Example(prompt="", completion="a b"),
        Example(prompt="q", completion="a"),
    ]


def test_preferences_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    assert read_examples(path) == [Preference(prompt="q", chosen="a", rejected="b")]


def test_prompts_keep_what_else_their_reward_needs(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "q", "answer": "a"}\n')
    assert read_prompts(path) == [
        Prompt(prompt="1+1=", columns={"answer": 2}),
        Prompt(prompt="q", columns={"answer": "a"}),
    ]


def test_chats_are_prompts_under_either_name(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path.write_text(f"{json.dumps({'messages': chat})}\n{json.dumps({'prompt': chat})}\n")
    assert read_prompts(path) == [Prompt(prompt=chat, columns={})] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no prompt in it"),
        ('{"text": "a"}', "line 1 has no prompt to answer"),
        ('{"prompt": "q"}\n{"prompt": []}', "line 2 has no prompt to answer"),
        ('{"messages": ["q"]}', "line 1 has a message that is not of the form"),
        (
            '{"messages": [{"role": "user", "content": ["q"]}]}',
            "line 1 has a message that is not of the form",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "line 1 ends with a message of the assistant",
        ),
        (
            '{"prompt": "q"}\n{"messages": [{"role": "user", "content": "q"}]}',
            "line 2 is of another kind than the first",
        ),
        ('{"prompt": "q", "answer": 2}\n{"prompt": "q"}', "line 2 has other names than the first line"),
        ('{"prompt": "q", "completion": "a"}', "line 1 has completion, a name that TRL uses itself"),
    ],
)
def test_bad_prompts_are_one_line_with_its_number(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_a_reward_whose_module_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--fine-tune-reward judges:exact: there is no module judges"):
        check_reward("judges:exact")
    (tmp_path / "judges.py").touch()
    check_reward("judges:exact")


def test_a_line_separator_inside_a_text_does_not_end_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a\u2028b"}\r\n{"text": "c"}\n', encoding="utf-8", newline="")
    assert read_examples(path) == [
        Example(prompt="", completion="a\u2028b"),
        Example(prompt="", completion="c"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no example in it"),
        ("\n\n", "there is no example in it"),
        ('{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (f'{{"text": {"1" * 5000}}}', "line 1 can't be read"),
        (f'{{"text": {"[" * 100_000}}}', "line 1 has lists or objects too deep inside each other"),
        (r'{"text": "a \ud83d b"}', r"line 1 has '\\ud83d' alone, half of a character"),
        ('{"txt": "a"}', "line 1 is not of the form"),
        ('["a"]', "line 1 is not of the form"),
        ('{"text": 3}', "line 1 is not of the form"),
        ('{"prompt": "q", "completion": " "}', "line 1 has no text to learn"),
        ('{"prompt": "q", "chosen": "a"}', "line 1 is not of the form"),
        (
            '{"prompt": "q", "chosen": "a", "rejected": "a"}',
            "line 1 has the same text as chosen and rejected",
        ),
        (
            '{"text": "a"}\n{"text": "b"}\n{"prompt": "q", "chosen": "a", "rejected": "b"}',
            "line 3 is of another kind",
        ),
    ],
)
def test_bad_data_is_one_line_with_its_number(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        read_examples(path)
    assert "\n" not in str(refused.value)


def test_flags_become_options_and_leave_the_engines_alone() -> None:
    given = {"fine_tune": "data.jsonl", "fine_tune_epochs": "3", "port": 8000}
    assert take_options(given) == FineTuneOptions(data=Path("data.jsonl"), epochs=3)
    assert given == {"port": 8000}
    assert take_options({"port": 8000}) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--fine-tune-epochs", "2"],
            "--fine-tune-epochs: there is nothing to train on; add --fine-tune DATA",
        ),
        (
            ["--fine-tune", "x", "--fine-tune-learning-rate", "0"],
            "--fine-tune-learning-rate: input should be greater",
        ),
        (["--fine-tune", "x", "--fine-tune-tokens", "1"], "--fine-tune-tokens: input should be greater"),
        (["--fine-tune", "x", "--fine-tune-reward", "judges"], "--fine-tune-reward: string should match"),
        (
            ["--fine-tune", "x", "--fine-tune-samples", "4"],
            "--fine-tune-samples needs --fine-tune-reward",
        ),
        (
            ["--fine-tune", "x", "--fine-tune-reward", "judges:exact", "--fine-tune-publish-s", "9"],
            "--fine-tune-publish-s does not go with --fine-tune-reward",
        ),
        (
            ["--fine-tune", "x", "--fine-tune-reward", "judges:exact", "--fine-tune-tokens", "256"],
            "--fine-tune-answer-tokens 256 leaves no token for prompts",
        ),
        (["--fine-tune", "x", "--role", "rollout"], "a rollout engine has a trainer of its own"),
        (
            ["--fine-tune", "x", "--relay", "embedded://h:1"],
            "it brings a relay of its own; leave --relay out",
        ),
        (["--fine-tune", "x", "--takes-weights", "false"], "leave --takes-weights out"),
        (["--fine-tune", "x", "--fine-tune-seed", "-1"], "--fine-tune-seed: "),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run_command("serve", serve.main, ["./model", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "the following arguments are required: --role"), (["--role", "serving"], "serving needs --pool")],
)
def test_role_and_pool_are_still_asked_for_without_fine_tuning(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(["./model", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_does_not_fit_twice_is_refused_with_the_numbers() -> None:
    check_memory(2 * 10**9, 8.0, 64 * 10**9)
    with pytest.raises(ConfigError, match=r"a model of 2\.0 GB needs 26\.0 GB .* and 20\.0 GB are free"):
        check_memory(2 * 10**9, 8.0, 20 * 10**9)


def test_a_folder_with_content_is_no_place_for_the_trained_model(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "model")
    check_output(tmp_path / "new" / "model")
    for folder, message in ((tmp_path / "new", "is not empty"), (tmp_path / "new" / "file", "can't be made")):
        with pytest.raises(ConfigError, match=f"--fine-tune-output {folder}: .*{message}"):
            check_output(folder)
        (tmp_path / "new" / "file").touch()


def test_a_model_that_does_not_fit_on_the_disk_of_its_folder_is_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"the model takes 1000000000\.0 GB, and its disk has .* GB free"):
        check_space(tmp_path, 10**18)


def test_a_model_in_the_hubs_cache_is_checked_against_the_memory_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    folder = tmp_path / "hub" / "models--org--chat" / "snapshots" / "0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("rose.node.fine_tune.options.available_bytes", lambda: 100)
    with pytest.raises(ConfigError, match="to be served and trained"):
        check(FineTuneOptions(data=data), "org/chat")


def test_a_log_without_a_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"--fine-tune-log .*: there is no folder .*no; make it"):
        check(FineTuneOptions(data=data, log=tmp_path / "no" / "x.jsonl"), "org/chat")


def test_a_rewards_prompts_with_their_answers_fit_the_engines_context(tmp_path: Path) -> None:
    options = FineTuneOptions(data=tmp_path, reward="judges:exact")  # 256 tokens of 512 for the answer
    assert options.within(None) == options.within("1k") == options.within("512") == options
    shorter = options.within("300")
    assert (shorter.tokens, shorter.answer_tokens) == (300, 256)
    assert FineTuneOptions(data=tmp_path).within("16").tokens == 512, "a text is not sent to the engine"
    with pytest.raises(ConfigError, match=r"--fine-tune-answer-tokens 256 .* --max-model-len 256: lower"):
        options.within("256")


def test_a_log_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"--fine-tune-log .*: it is a folder or can't be written to"):
        check(FineTuneOptions(data=data, log=tmp_path), "org/chat")


def test_more_processes_than_the_engine_has_gpus_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    options = FineTuneOptions(data=data, processes=3)
    check(options, "org/chat", 4)
    check(options, "org/chat", 0)
    with pytest.raises(ConfigError, match=r"--fine-tune-processes 3: .* which has 2; use at most 2"):
        check(options, "org/chat", 2)
