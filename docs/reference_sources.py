"""Where the reference pages look in the code, and how routes and metrics are read from it.

Owns: the lists of configuration files, of servers and of exporters. Promises: routes and metrics are parsed
and not run, so no server starts. Never: guesses; a name that it can't work out raises ValueError.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTINGS = (
    (
        "router.yaml",
        "`rose router router.yaml`. Times are in seconds. Flags win over the file.",
        "rose.scheduler.rollout.router_config.RouterConfig",
    ),
    ("node.yaml", "`rose node node.yaml`: one shared GPU.", "rose.node.node_config.NodeConfig"),
    (
        "Settings of one engine",
        "The key `rose` of vLLM's `--additional-config`. `rose serve` has a flag for each, and an engine of "
        "node.yaml may have them as keys.",
        "rose.engine.settings.EngineSettings",
    ),
    (
        "ray.yaml",
        "`rose ray up ray.yaml`: engines, relay and router on a Ray cluster.",
        "rose.ray.ray_config.RayConfig",
    ),
    (
        "cluster.yaml",
        "`rose sched serve cluster.yaml`: the nodes that whole jobs share.",
        "rose.scheduler.runtime.job.spec.ServeSpec",
    ),
    ("job.yaml", "`rose sched submit job.yaml`: one whole job.", "rose.scheduler.runtime.job.spec.RunSpec"),
)

ROUTE_FOLDERS = (
    (
        "Router",
        "Clients use these routes. Where an API key is set, they ask for it; `/admin` and `/workers` ask for "
        "the admin key, and `/health` and `/metrics` for none.",
        "scheduler/rollout/http",
    ),
    (
        "Engine",
        "The plugin adds these routes to vLLM's own. They ask for `ROSE_KEY` where it is set.",
        "rose/engine/http",
    ),
    ("Embedded relay", "Publishers and followers use these routes.", "transfer/relay"),
    ("Dashboard of the job scheduler", "These routes only read.", "scheduler/dashboard"),
)

BODY_MODULES = {
    "Router": ("rose.scheduler.rollout.http.admin", "rose.scheduler.rollout.http.shared.peers"),
    "Engine": ("rose.messages",),
}
"""Where the JSON bodies of a server's own routes are defined; others are OpenAI's, vLLM's and SGLang's."""

METRIC_FOLDERS = (
    ("Router", "`GET /metrics` of the router.", "scheduler/rollout"),
    ("Engine", "vLLM's own `/metrics`, beside vLLM's metrics.", "rose/engine"),
    (
        "Job scheduler",
        "`GET /metrics` of the dashboard. Counters begin anew when the scheduler starts; iterations and "
        "resubmissions are kept.",
        "scheduler/dashboard",
    ),
)

_METHODS = ("get", "post", "put", "delete")
_FAMILIES = {
    "CounterMetricFamily": "counter",
    "GaugeMetricFamily": "gauge",
    "HistogramMetricFamily": "histogram",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    method: str
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class _Module:
    """One parsed file: its constants, its functions, and who is inside what."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.constants: dict[str, ast.expr] = {}
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.constants[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.constants[name] = value
        self.functions = {
            node.name: node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def _nearest(self, node: ast.AST, name: str) -> ast.expr | None:
        """The constant of that name in the function around `node`, else in the file."""
        while (parent := self.parents.get(node)) is not None:
            node = parent
            if isinstance(node, ast.FunctionDef):
                for each in ast.walk(node):
                    if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") == name:
                        return each.value
        return self.constants.get(name)

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def values(self, node: ast.expr) -> tuple[str, ...]:
        """The strings that an expression of labels stands for."""
        if isinstance(node, ast.Constant):
            return (str(node.value),)
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.values(self.constants[node.id])
        if isinstance(node, ast.Starred):
            return self.values(node.value)
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(value for each in node.elts for value in self.values(each))
        raise ValueError(f"{self.path}:{node.lineno}: {ast.unparse(node)} is no constant")

    def loop_items(self, node: ast.AST, name: str) -> list[tuple[ast.expr, ast.expr | None]]:
        """Keys and values of the constant over which the loop around `node` that sets `name` goes."""
        while (parent := self.parents.get(node)) is not None:
            node = parent
            if isinstance(node, ast.For) and name in {getattr(n, "id", "") for n in ast.walk(node.target)}:
                return self._items(node)
        return []

    def _items(self, loop: ast.For) -> list[tuple[ast.expr, ast.expr | None]]:
        over: Any = loop.iter
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute):
            over = over.func.value
        items: Any = self._nearest(loop, getattr(over, "id", "")) or over
        if isinstance(items, ast.Dict):
            pairs = zip(items.keys, items.values, strict=True)
            return [(key, value) for key, value in pairs if key is not None]
        return [(each, None) for each in getattr(items, "elts", [])]


def _modules(folder: Path) -> Iterator[_Module]:
    for path in sorted(folder.rglob("*.py")):
        yield _Module(path)


# Routes ----------------------------------------------------------------------------------------------------


def read_routes(folder: Path) -> list[HttpRoute]:
    """Every route that the folder's code adds, in the code's order, with its handler's first sentence."""
    return [route for module in _modules(folder) for route in [*_added(module), *_decorated(module)]]


def _added(module: _Module) -> Iterator[HttpRoute]:
    for call in module.calls():
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        method = name.removeprefix("add_")
        is_aiohttp = name.startswith("add_") or ast.unparse(call.func).startswith("web.")
        if not is_aiohttp or method not in _METHODS or len(call.args) < 2:
            continue
        for path in _paths(module, call):
            yield HttpRoute(method=method.upper(), path=path, text=_text(module, call.args[1]))


def _paths(module: _Module, call: ast.Call) -> tuple[str, ...]:
    path = call.args[0]
    if isinstance(path, ast.Name) and path.id not in module.constants:
        return tuple(value for key, _ in module.loop_items(call, path.id) for value in module.values(key))
    return module.values(path)


def _decorated(module: _Module) -> Iterator[HttpRoute]:
    for function in module.functions.values():
        for mark in function.decorator_list:
            match mark:
                case ast.Call(func=ast.Attribute(value=router, attr=method)) if method in _METHODS:
                    path = _prefix(module, router) + module.values(mark.args[0])[0]
                    yield HttpRoute(method=method.upper(), path=path, text=_first_sentence(function))


def _prefix(module: _Module, router: ast.expr) -> str:
    made = module.constants.get(getattr(router, "id", ""))
    if not isinstance(made, ast.Call):
        return ""
    given = [word.value for word in made.keywords if word.arg == "prefix"]
    return module.values(given[0])[0] if given else ""


def _text(module: _Module, handler: ast.expr) -> str:
    is_made = isinstance(handler, ast.Call)  # by a function that defines the handler
    name = ast.unparse(handler.func if isinstance(handler, ast.Call) else handler).rpartition(".")[2]
    function = module.functions.get(name)
    if function is None:
        return ""
    inner = [each for each in ast.walk(function) if isinstance(each, ast.AsyncFunctionDef)] if is_made else []
    return _first_sentence(inner[0] if inner else function)


def _first_sentence(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = ast.get_docstring(function) or function.name.removeprefix("_").replace("_", " ").capitalize()
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


# Metrics ---------------------------------------------------------------------------------------------------


def read_metrics(folder: Path) -> list[Metric]:
    """Every metric whose name the folder's code writes down, in the code's order."""
    found = {metric.name: metric for module in _modules(folder) for metric in _of_module(module)}
    return list(found.values())


def _of_module(module: _Module) -> Iterator[Metric]:
    for call in module.calls():
        function = getattr(call.func, "id", "")
        if function in _FAMILIES:
            yield from _made(module, call, _FAMILIES[function], call)
        elif function in module.functions:
            for inner in ast.walk(module.functions[function]):
                if isinstance(inner, ast.Call) and (kind := _FAMILIES.get(getattr(inner.func, "id", ""))):
                    yield from _made(module, call, kind, inner)


def _made(module: _Module, call: ast.Call, kind: str, family: ast.Call) -> Iterator[Metric]:
    if len(call.args) < 2:
        return
    ending = "_total" if kind == "counter" else ""
    for name, text in _names(module, call):
        if name.startswith("rose_"):
            yield Metric(name=name + ending, kind=kind, labels=_labels(module, call, family), text=text)


def _names(module: _Module, call: ast.Call) -> Iterator[tuple[str, str]]:
    name, text = call.args[:2]
    if isinstance(name, ast.Constant):
        yield str(name.value), str(getattr(text, "value", ""))
        return
    variables = [node.id for node in ast.walk(name) if isinstance(node, ast.Name)]
    for key, value in module.loop_items(call, variables[0]) if variables else []:
        said = value.elts[0] if isinstance(value, ast.Tuple) else value
        part = str(getattr(key, "value", ""))
        whole = part if isinstance(name, ast.Name) else _filled(name, part)
        yield whole, str(getattr(said, "value", ""))


def _filled(name: ast.expr, part: str) -> str:
    pieces = name.values if isinstance(name, ast.JoinedStr) else []
    return "".join(str(piece.value) if isinstance(piece, ast.Constant) else part for piece in pieces)


def _labels(module: _Module, call: ast.Call, family: ast.Call) -> tuple[str, ...]:
    given = [word.value for word in family.keywords if word.arg == "labels"]
    if not given:
        return ()
    if family is call:
        return module.values(given[0])
    parameters = [each.arg for each in module.functions[getattr(call.func, "id", "")].args.args]
    found: list[str] = []
    for each in given[0].elts if isinstance(given[0], ast.List) else given:
        name = getattr(each, "id", "")
        is_parameter = name in parameters and parameters.index(name) < len(call.args)
        found += module.values(call.args[parameters.index(name)] if is_parameter else each)
    return tuple(found)
