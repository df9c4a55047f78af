"""What of a run is emulated: on which hardware, on which links, and how far each figure can be relied upon."""

from __future__ import annotations

import re
from collections.abc import Iterable

from poseidon.config.units import parse_rate, parse_seconds
from poseidon.errors import UserError
from poseidon.reporting.runs import Run, number

#: The papers' ablation, step by step: comm and overlap -> the choice of ``conf/comm``, and what they call it.
_PAPERS = {
    ("ps", "none"): ("caffe_ps", "Caffe+PS"),
    ("ps", "backward"): ("wfbp", "+WFBP/DWBP"),
    ("hybrid", "backward"): ("poseidon", "Poseidon"),
}
#: Keys of a hardware profile that give times: of all models, and by model.
_RATES = ("flops", "flops_batchnorm", "memory_bandwidth", "host_copy", "server_sum")
_BY_MODEL = ("iterations", "layers")
_NULL = ("null", "None", "{}", "")


def papers_name(run: Run) -> str | None:
    """Of this way of communicating, where accelerators like the papers' are emulated."""
    return _papers(run)[1]


def papers_names(runs: Iterable[Run]) -> list[str]:
    """What each of the papers' names that these runs have means here."""
    words = {}
    for run in runs:
        name, rule = papers_name(run), " comm.rule=paper" if run.comm == "hybrid" else ""
        if name:
            words[name] = f"{name}: comm={run.comm} comm.overlap={run.text('overlap')}{rule}"
    return list(words.values())


def papers_choice(run: Run) -> str | None:
    """The choice of ``conf/comm`` that is this way of communicating in the papers' experiments."""
    return _papers(run)[0]


def _papers(run: Run) -> tuple[str | None, str | None]:
    chosen = run.text("rule") == "paper" and run.params.get("comm.plan", "") in _NULL
    if not run.sleeps or (run.comm == "hybrid" and not chosen):
        return None, None
    return _PAPERS.get((run.comm, run.text("overlap")), (None, None))


def hardware(run: Run) -> str:
    """Name of its profile."""
    return run.text("hardware", "unnamed") if run.sleeps else "none (this machine computes)"


def hardware_params(run: Run) -> dict[str, str]:
    """The config keys of its profile that give this run's times; {} if the machine computes."""
    if not run.sleeps:
        return {}
    model = _model(run)
    single = {f"hardware.{key}" for key in _RATES} | {f"hardware.{key}.{model}" for key in _BY_MODEL}
    many = tuple(f"hardware.{key}.{model}." for key in _BY_MODEL)
    return {
        key: value
        for key, value in run.params.items()
        if (key in single or key.startswith(many)) and not key.endswith((".source", ".trust"))
    }


def link(run: Run) -> str:
    """Of each node, in words that are the same for the same link; "" if no network is emulated.

    A latency that the kernel could not emulate is none.
    """
    if "network" not in run.emulated_costs:
        return ""
    slow = [f"node {node}: {_rate_words(rate)}" for node, rate in _node_rates(run).items()]
    latency = _seconds("cluster.latency", run.params.get("cluster.latency"))
    if latency and not any("cluster.latency" in word for word in not_emulated([run])):
        slow.append(f"latency {latency * 1e6:g} us")
    return ", ".join([_rate_words(run.params.get("cluster.bandwidth")), *slow])


def straggler(run: Run) -> str:
    """Which node is made slow, when, and by how much, in words that are the same for the same; "" if none is."""
    delay = _seconds("cluster.straggler.delay", run.params.get("cluster.straggler.delay"))
    if "straggler" not in run.emulated_costs or not delay:
        return ""
    node = run.params.get("cluster.straggler.node", "null")
    share = _number(run.params.get("cluster.straggler.probability")) or 1.0
    who = "a node, drawn each time," if node in _NULL else f"node {node}"
    when = "every iteration" if share == 1 else f"{100 * share:.4g} % of iterations"
    return f"{who} slow by {delay * 1e3:g} ms in {when}"


def bandwidth(run: Run) -> float | None:
    """Bits/s of an emulated network's links; None without one, if its links differ or have no limit, or if a node is
    slow: nothing published is of such a cluster."""
    if "network" not in run.emulated_costs or _node_rates(run) or straggler(run):
        return None
    return _rate(run.params.get("cluster.bandwidth"))


def link_seconds(run: Run) -> float | None:
    """Per iteration, that the busiest node's link takes to send at its configured rate, headers included; None if links
    have no limit. Nodes that only serve come after the workers."""
    lists = [run.summary.get(f"{whose}bytes_sent_per_iteration") for whose in ("", "server_")]
    sent = [nbytes for nodes in lists if isinstance(nodes, (list, tuple)) for nbytes in nodes]
    if "network" not in run.emulated_costs or not isinstance(lists[0], (list, tuple)):
        return None
    own, usual = _node_rates(run), run.params.get("cluster.bandwidth")
    rates = [_rate(own.get(str(node), usual)) for node in range(len(sent))]
    return max(
        (8 * (number(nbytes) or 0.0) / rate for nbytes, rate in zip(sent, rates, strict=True) if rate), default=None
    )


def basis(runs: Iterable[Run]) -> list[str]:
    """A line for each emulated cost of comparable runs: what it is, and how far that can be relied upon."""
    runs = list(runs)
    costs = list(dict.fromkeys(cost for run in runs for cost in run.emulated_costs))
    lines = [line for cost in costs for line in dict.fromkeys(_basis(cost, run) for run in runs) if line]
    return [*lines, *(f"not emulated: {word}" for word in not_emulated(runs))]


def not_emulated(runs: Iterable[Run]) -> list[str]:
    """What was asked for, and is not."""
    found: dict[str, None] = {}
    for run in runs:
        words = run.summary.get("not_emulated")
        found |= dict.fromkeys(map(str, words) if run.emulated and isinstance(words, (list, tuple)) else ())
    return list(found)


def _basis(cost: str, run: Run) -> str | None:
    if cost not in run.emulated_costs:
        return None
    if cost == "layers":
        return f"layers: {run.text('hardware_basis', 'not known')}; profile {hardware(run)}{_described(run)}"
    if cost == "reconstruction":
        return f"reconstruction: of a linear layer's backward pass the weight's part, once per node; {_density(run)}"
    if cost == "optimizer step":
        return f"optimizer step: {_profile_rate(run, 'memory_bandwidth', 'of the memory')}"
    if cost == "network":
        return None if run.comm == "single" else f"network: a namespace per node, links by tc tbf, {link(run)} each way"
    if cost == "straggler":
        return f"straggler: {straggler(run)}, before its forward pass" if straggler(run) else None
    words = {"host_copy": "each way between device and host", "server_sum": "of gradients that a host adds up"}
    return f"{cost}: {_profile_rate(run, cost, words[cost])}" if cost in words else cost


def _described(run: Run) -> str:
    words = run.params.get("hardware.description", "null")
    return "" if words in _NULL else f" ({words})"


def _profile_rate(run: Run, key: str, words: str) -> str:
    rate = _number(run.params.get(f"hardware.{key}"))
    return f"{rate / 1e9:.4g} GB/s {words} ({_provenance(run, key)})" if rate else "no time"


def _density(run: Run) -> str:
    given = any(param.startswith("model.density.") for param in run.params)
    return "factors as sparse as model.density says" if given else "factors are dense"


def _provenance(run: Run, key: str) -> str:
    """Of a single rate: its own, else the profile's."""
    own = f"hardware.sources.{key}"
    return _trust(run, own if f"{own}.trust" in run.params else "hardware")


def _trust(run: Run, key: str) -> str:
    source = run.params.get(f"{key}.source", "null")
    return run.params.get(f"{key}.trust", "assumed") + ("" if source in _NULL else f": {source}")


def _model(run: Run) -> str:
    """As it stands in the names of params."""
    return re.sub(r"[^\w. -]", "_", run.text("model"))


def _node_rates(run: Run) -> dict[str, str]:
    """Of the links that are not like the others, by node."""
    key, usual = "cluster.node_bandwidth.", _rate(run.params.get("cluster.bandwidth"))
    rates = {name.removeprefix(key): value for name, value in run.params.items() if name.startswith(key)}
    return {node: rates[node] for node in sorted(rates, key=lambda n: (len(n), n)) if _rate(rates[node]) != usual}


def _rate_words(text: str | None) -> str:
    rate = _rate(text)
    if rate is None:
        return "no limit" if text is None or text in _NULL else text
    unit, size = next(((u, s) for u, s in (("Gbit/s", 1e9), ("Mbit/s", 1e6)) if rate >= s), ("kbit/s", 1e3))
    return f"{rate / size:.6g} {unit}"


def _rate(text: str | None) -> float | None:
    try:
        return parse_rate("cluster.bandwidth", text) if text is not None else None
    except UserError:
        return None


def _seconds(key: str, text: str | None) -> float | None:
    try:
        return parse_seconds(key, text) if text is not None else None
    except UserError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return number(float(text)) if text is not None else None
    except ValueError:
        return None
