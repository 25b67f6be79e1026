"""Reading routes and metrics out of source text."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_sources", ROOT / "docs" / "reference_sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_routes_of_aiohttp_are_read_with_constants_and_loops(sources: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "_PATH = '/finish'\n"
        "_FORMATS = {'/a': 1, '/b': 2}\n"
        "async def finish(request):\n    '''Ends a session.\n\n    More.'''\n"
        "async def make(request): ...\n"
        "def build(app):\n"
        "    app.router.add_post(_PATH, finish)\n"
        "    for path, shape in _FORMATS.items():\n        app.router.add_get(path, make)\n"
    )
    routes = {(route.method, route.path): route.text for route in sources.read_routes(tmp_path)}
    assert routes == {("POST", "/finish"): "Ends a session.", ("GET", "/a"): "Make", ("GET", "/b"): "Make"}


def test_routes_of_fastapi_are_read_with_their_prefix(sources: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "endpoint.py").write_text(
        "router = APIRouter(prefix='/rose/v1')\n"
        "@router.get('/status')\nasync def get_status():\n    '''What the engine does.'''\n"
    )
    (route,) = sources.read_routes(tmp_path)
    assert (route.method, route.path, route.text) == ("GET", "/rose/v1/status", "What the engine does.")


def test_metrics_are_read_from_families_helpers_and_loops(sources: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text(
        "ENGINE = ('engine_id', 'role')\n"
        "_TEXTS = {'queue': 'Waiting.', 'turn': 'All of it.'}\n"
        "def collect():\n"
        "    yield GaugeMetricFamily('rose_up', 'One if up.', labels=[])\n"
        "    counters = {'rose_steps': ('Steps.', 1)}\n"
        "    for name, (text, value) in counters.items():\n        yield _counter(name, text, value)\n"
        "    for kind, text in _TEXTS.items():\n"
        "        yield HistogramMetricFamily(f'rose_{kind}_seconds', text, labels=['model'])\n"
        "def _counter(name, text, value):\n    return CounterMetricFamily(name, text, labels=ENGINE)\n"
    )
    found = {
        metric.name: (metric.kind, metric.labels, metric.text) for metric in sources.read_metrics(tmp_path)
    }
    assert found == {
        "rose_up": ("gauge", (), "One if up."),
        "rose_steps_total": ("counter", ("engine_id", "role"), "Steps."),
        "rose_queue_seconds": ("histogram", ("model",), "Waiting."),
        "rose_turn_seconds": ("histogram", ("model",), "All of it."),
    }


def test_a_label_that_cannot_be_worked_out_is_an_error(sources: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text("GaugeMetricFamily('rose_up', 'One.', labels=make_labels())\n")
    with pytest.raises(ValueError, match="is no constant"):
        sources.read_metrics(tmp_path)


@pytest.mark.parametrize("kind", ["routes", "metrics"])
def test_every_folder_of_the_reference_has_something_to_show(sources: ModuleType, kind: str) -> None:
    folders = sources.ROUTE_FOLDERS if kind == "routes" else sources.METRIC_FOLDERS
    read = sources.read_routes if kind == "routes" else sources.read_metrics
    assert [folder for _, _, folder in folders if not read(ROOT / folder)] == []


def test_every_metric_has_a_row_that_says_what_to_make_of_it(sources: ModuleType) -> None:
    names = [
        metric.name for *_, folder in sources.METRIC_FOLDERS for metric in sources.read_metrics(ROOT / folder)
    ]
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert len(names) > 50
    assert [name for name in names if f"\n| `{name}` |" not in text] == []
