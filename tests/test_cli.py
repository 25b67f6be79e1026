"""The command line as a user meets it."""

import ast
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rose.arguments import CommandParser
from rose.cli import COMMANDS
from rose.errors import install_hint
from rose.memory.daemon.daemon import start_daemon
from rose.ports import free_port
from tests.commands import rose

ROOT = Path(__file__).parents[1]


def assert_refused(result: subprocess.CompletedProcess[str], *expected: str) -> None:
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("rose: error: "), result.stderr
    for text in expected:
        assert text in lines[0]


def test_help_lists_every_command_and_a_refusal_is_the_status_of_the_process() -> None:
    command = [sys.executable, "-m", "rose.cli"]
    shown = subprocess.check_output([*command, "--help"], text=True)
    assert all(each.name in shown for each in COMMANDS)
    assert_refused(subprocess.run([*command, "srve"], capture_output=True, text=True, check=False))


@pytest.mark.parametrize("name", [(), ("sched",)])
def test_no_command_shows_the_help(name: tuple[str, ...]) -> None:
    result = rose(*name)
    assert result.returncode == 2 and "commands:" in result.stderr


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = rose(name, "--help")
    assert result.returncode == 0, result.stderr
    assert "example:" in result.stdout


def test_a_long_description_is_wrapped_and_its_examples_keep_their_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    example = "  - {model: ./models/chat, role: serving, port: 8000, slo_ttft_ms: 500, slo_tpot_ms: 100}"
    parser = CommandParser("rose x", "Says " + "a word " * 30 + f"in a file.\n\n{example}", "rose x")
    lines = parser.format_help().splitlines()
    assert example in lines
    assert [line for line in lines if len(line) > 80 and line != example] == []


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_every_command_refuses_an_unknown_flag_in_one_line(name: str) -> None:
    required = {"serve": ["MODEL", "--role", "rollout", "--pool", "no-such-pool"]}
    result = rose(name, *required.get(name, []), "--no-such-flag-of-rose")
    assert_refused(result)


@pytest.mark.slow
def test_every_flag_and_argument_says_what_it_is() -> None:
    silent = []
    for path in (each for part in ("rose", "scheduler", "transfer") for each in (ROOT / part).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            is_added = isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
            # None: the settings of a model become flags, whose help is the field's docstring.
            if is_added and not given.keys() & {"help", None} and given.get("action") != "'version'":
                silent.append(f"{path}:{call.lineno}")
    assert silent == []


def test_a_misspelt_command_gets_a_suggestion() -> None:
    assert_refused(rose("srve"), "no command 'srve'", "did you mean serve?")
    assert_refused(rose("sched", "stats"), "no subcommand 'stats'", "did you mean status?")


def test_import_rose_loads_neither_torch_nor_vllm() -> None:
    script = "import sys, rose, rose.cli; sys.exit(bool({'torch', 'vllm', 'rose.demo'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_command_answers_before_torch_vllm_or_transformers_are_loaded() -> None:
    """Each takes seconds to load. Whoever asks for help or mistypes a flag waits for none of them."""
    script = (
        "import importlib, sys\n"
        f"for name in {[command.module for command in COMMANDS]}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_linked_folders_refuse_to_be_imported_by_themselves() -> None:
    root = Path(__file__).parents[1]
    for name, folder in (("scheduler", "."), ("transfer", "."), ("measure", "benchmarks")):
        result = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            cwd=root / folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"import rose.{name}" in result.stderr


class TestRouter:
    def test_a_bad_worker_is_refused(self) -> None:
        assert_refused(rose("router", "--worker", "nonsense"), "--worker nonsense", "http://HOST:PORT")

    def test_an_unknown_key_names_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "router.yaml").write_text("prot: 8100\n")
        assert_refused(rose("router", "router.yaml", cwd=tmp_path), "router.yaml: prot: unknown key")


def test_a_pool_that_has_an_owner_is_refused(runtime_dir: Path) -> None:
    with start_daemon("g", num_slabs=4, headroom_slabs=1, runtime_dir=runtime_dir):
        assert_refused(
            rose("pool", "g", "--num-slabs", "4", "--headroom-slabs", "1"), "pool already owned: g"
        )


def test_a_relay_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(rose("relay", "--port", port), f"--port {port}", "choose another port")


def test_a_demo_without_its_trace_is_refused(tmp_path: Path) -> None:
    assert_refused(rose("demo", "--trace", "none.csv", cwd=tmp_path), "--trace none.csv: no such file")
    assert list(tmp_path.iterdir()) == []


def test_a_demo_into_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(
        rose("demo", "--out", "file/out", cwd=tmp_path), "file/out: can't be made (Not a directory)"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("pool", "gpu0", "--num-slabs", "8", "--model"),
        ("sched", "profile-stages", "-o", "stages.json"),
        ("front", "--router", "http://127.0.0.1:9", "--model"),
    ],
)
def test_a_path_of_no_model_is_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    assert_refused(rose(*arguments, "./none"), "'./none': no such directory; check the path")


@pytest.mark.parametrize(
    "arguments",
    [
        ("top", "--once", "--worker"),
        ("top", "--once", "--router"),
        ("harm", "--worker"),
        ("front", "--model", "m", "--router"),
    ],
)
def test_an_address_without_its_scheme_is_refused(arguments: tuple[str, ...]) -> None:
    assert_refused(rose(*arguments, "127.0.0.1:9"), "expected http://HOST:PORT, got '127.0.0.1:9'")


class TestProfile:
    def test_a_missing_model_is_refused_before_anything_starts(self) -> None:
        assert_refused(rose("profile", "./none"), "model ./none: no such directory")

    def test_model_comes_first(self) -> None:
        assert_refused(rose("profile", "--max-model-len", "512", "m"), "MODEL comes first")


class TestServe:
    def test_unknown_pool_is_refused(self, runtime_dir: Path) -> None:
        result = rose("serve", "m", "--role", "rollout", "--pool", "nope")
        assert_refused(result, "pool nope", str(runtime_dir), "rose pool nope")

    def test_a_serving_engine_without_a_pool_is_refused(self) -> None:
        assert_refused(
            rose("serve", "m", "--role", "serving"), "--role serving needs --pool", "rose pool NAME"
        )

    def test_a_dedicated_rollout_engine_needs_no_pool(self) -> None:
        assert_refused(rose("serve", "./none", "--role", "rollout"), "model ./none: no such directory")

    def test_wrong_type_names_the_flag(self) -> None:
        result = rose("serve", "m", "--role", "serving", "--pool", "p", "--slo-ttft-ms", "fast")
        assert_refused(result, "--slo-ttft-ms", "'fast'")

    def test_model_comes_first(self) -> None:
        result = rose("serve", "--max-model-len", "2048", "m", "--role", "serving", "--pool", "p")
        assert_refused(result, "MODEL comes first")

    def test_unknown_role_is_refused(self) -> None:
        assert_refused(rose("serve", "m", "--role", "boss", "--pool", "p"), "--role", "'boss'")


class TestNode:
    def test_missing_file_is_refused(self, tmp_path: Path) -> None:
        assert_refused(rose("node", "none.yaml", cwd=tmp_path), "none.yaml: can't be read")

    def test_unknown_key_names_file_key_and_fix(self, tmp_path: Path) -> None:
        (tmp_path / "NODE.yaml").write_text(
            "pool: {name: g, num_slabs: 8, headroom_slabs: 1}\n"
            "engines: [{model: m, role: serving, prot: 1}]\n"
        )
        result = rose("node", "NODE.yaml", cwd=tmp_path)
        assert_refused(result, "NODE.yaml: engines[0].prot: unknown key; did you mean port?")

    def test_missing_model_is_refused_before_anything_starts(self, tmp_path: Path, runtime_dir: Path) -> None:
        (tmp_path / "NODE.yaml").write_text(
            "pool: {name: g, num_slabs: 8, headroom_slabs: 1}\n"
            f"engines: [{{model: ./none, role: serving, port: {free_port()}}}]\n"
        )
        result = rose("node", "NODE.yaml", cwd=tmp_path)
        assert_refused(result, "NODE.yaml: model ./none: no such directory")
        assert list(runtime_dir.glob("pool-*")) == []


def test_top_reports_a_worker_that_does_not_answer(runtime_dir: Path) -> None:
    result = rose("top", "--worker", "http://127.0.0.1:9", "--once")
    assert result.returncode == 1 and "127.0.0.1:9" in result.stdout


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("top", "--interval-s", "-1"),
        ("top", "--interval-s", "nan"),
        ("profile", "--concurrency", "0"),
        ("router", "--port", "99999"),
        ("router", "--front", "0"),
    ],
)
def test_a_number_out_of_range_is_refused(command: str, flag: str, value: str) -> None:
    assert_refused(rose(command, flag, value), flag, f"'{value}' is not a")


def test_a_missing_package_is_named_with_a_command_that_works_in_the_checkout() -> None:
    assert install_hint("ray") == "in ROSE's checkout, run: uv pip install -e '.[ray]'"
    assert "--override .ci/overrides.txt -e '.[cpu]' or uv pip install -e '.[cuda]'" in install_hint(
        "cpu", "cuda"
    )
