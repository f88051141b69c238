"""`fuse_row`: the calls of a one-row step, with norms, gates and sums inside products.

A step of one row is bound by launches and by reading weights. Next to read: `TritonOps.linear_row`.
"""

from collections.abc import Callable, Sequence

from quire._native import Activation
from quire.runtime.device.plan import DeviceCall, RowsView

WRITTEN = {"out", "cos", "sin", "choices", "routed"}
"""Fields that ops write, and read only to add to them."""


def fuse_row(calls: Sequence[DeviceCall], linear_row: Callable[..., None]) -> list[DeviceCall]:
    """Return the calls with each chain of norm, product and gate as one call of `linear_row`, where possible."""
    fused: list[DeviceCall] = []
    index = 0
    while index < len(calls):
        call, taken = _product_at(calls, index, linear_row)
        fused.append(call)
        index += taken
    return fused


def _product_at(calls: Sequence[DeviceCall], index: int, linear_row: Callable[..., None]) -> tuple[DeviceCall, int]:
    """Return the call to make at `index`, and the number of calls that it replaces."""
    norm = calls[index] if _is_row_norm(calls[index]) else None
    at = index + (norm is not None)
    gemm = calls[at] if at < len(calls) else calls[index]
    if not _is_product(gemm):
        return calls[index], 1
    values = gemm.values
    if norm is not None and not _hands_over(calls, norm, at):
        return calls[index], 1
    x = values["x"] if norm is None else norm.values["x"]
    given = {
        **{name: values[name] for name in ("weight", "bias", "out", "activation", "gated", "add")},
        "x": x,
        "norm": None if norm is None else norm.values["weight"],
        "epsilon": 0.0 if norm is None else norm.values["epsilon"],
    }
    gate = calls[at + 1] if at + 1 < len(calls) else gemm
    if not (values["gated"] or values["add"]) and values["activation"] == Activation.none and _is_gate(gate):
        with_gate = {**given, "out": gate.values["out"], "activation": gate.values["activation"], "gated": True}
        if _hands_over(calls, gemm, at + 1) and not _overlap(_places(with_gate["out"]), _places(x)):
            return DeviceCall("linear_row", linear_row, with_gate), at + 2 - index
    if _overlap(_places(given["out"]), _places(x)):  # programs still read what others write
        return calls[index], 1
    return DeviceCall("linear_row", linear_row, given), at + 1 - index


def _is_row_norm(call: DeviceCall) -> bool:
    values = call.values
    return (
        call.name == "norm"
        and values["weight"] is not None
        and values["bias"] is None
        and values["gates"] is None
        and values["groups"] == 1
        and not (values["subtract_mean"] or values["add"])
    )


def _is_product(call: DeviceCall) -> bool:
    values = call.values
    return (
        call.name == "gemm"
        and values["lora"] is None
        and values["x"].whole.stride(1) == 1
        and values["weight"].is_contiguous()
    )


def _is_gate(call: DeviceCall) -> bool:
    return call.name == "activate" and call.values.get("gated", False) and not call.values.get("from_logit_rows")


def _hands_over(calls: Sequence[DeviceCall], call: DeviceCall, at: int) -> bool:
    """Return whether the call at `at` reads the result of `call`, and no later one does."""
    live = _places(call.values["out"])
    if _places(calls[at].values["x"]) != live:
        return False
    for later in calls[at + 1 :]:
        views = [(name, _places(value)) for name, value in later.values.items() if isinstance(value, RowsView)]
        if any(_overlap(places, live) for name, places in views if _is_read(later, name)):
            return False
        for name, places in views:
            if name in WRITTEN and places.start <= live.start:
                live = range(max(live.start, places.stop), live.stop)
        if len(live) == 0:
            return True
    return True


def _is_read(call: DeviceCall, name: str) -> bool:
    return name not in WRITTEN or bool(call.values.get("add"))


def _places(view: RowsView) -> range:
    """Return the addresses of the first row."""
    start = view.whole.data_ptr()
    return range(start, start + view.whole.shape[1] * view.whole.itemsize)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
