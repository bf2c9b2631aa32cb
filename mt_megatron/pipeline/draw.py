"""Pictures of a simulated step: one row per rank over time, as text and as SVG.

In both a computation shows its micro-batch; chunks are told apart by a letter (text) or a shade (SVG).
"""

from __future__ import annotations

from colorsys import hls_to_rgb
from html import escape

from .actions import Action, Kind
from .simulate.memory import activation_peaks
from .simulate.timeline import Timeline

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FILL = {Kind.F: "-", Kind.B: "=", Kind.W: "~"}
_IDLE = "."

_HUES = {Kind.F: (212, 72), Kind.B: (28, 82), Kind.W: (140, 42)}
"""Hue in degrees and saturation in percent."""
_LIGHTEST, _DARKEST = 82, 58
"""Lightness in percent of the first and the last chunk."""
_LEFT, _RIGHT, _TOP, _ROW, _BAR, _LANE = 64, 132, 46, 40, 24, 6
_LEAST_LABEL = 9.0
"""Width in pixels that a number needs."""


def text(timeline: Timeline, width: int = 120) -> str:
    """One line of at most ``width`` characters per rank, ``F3-`` and ``B3==`` where there is room for it,
    ``.`` where a rank waits, and a line of figures below."""
    schedule = timeline.program.schedule
    placement = schedule.placement
    head = len(f"rank {placement.ranks - 1} ")
    room = max(20, width - head)
    shortest = min((s.end - s.begin for spans in timeline.spans for s in spans if s.end > s.begin), default=1)
    # A whole number of columns for the shortest computation, if that fits: then equal ones look equal.
    scale = room / timeline.makespan if timeline.makespan else 0.0
    if scale * shortest >= 1.0:
        scale = int(scale * shortest) / shortest
    lines = []
    for rank, spans in enumerate(timeline.spans):
        row = [_IDLE] * round(scale * timeline.makespan)
        for span in spans:
            begin, end = round(scale * span.begin), round(scale * span.end)
            fill = _FILL[span.action.kind] * (end - begin)
            row[begin:end] = (
                _label(span.action, placement.chunk(span.action.stage), placement.chunks) + fill
            )[: end - begin]
        lines.append(f"{f'rank {rank}':<{head}}{''.join(row)}")
    return "\n".join([*lines, figures(timeline)])


def _label(action: Action, chunk: int, chunks: int) -> str:
    return f"{action.kind.value}{action.microbatch}{_LETTERS[chunk % 26] if chunks > 1 else ''}"


def figures(timeline: Timeline) -> str:
    """Makespan, bubble and activations of a step in one line."""
    peaks = activation_peaks(timeline.program.schedule)
    return (
        f"{timeline.program.schedule.name}: {seconds(timeline.makespan)}, bubble {timeline.bubble:.1%}, "
        f"at most {max(peaks)} activations on a rank ({', '.join(map(str, peaks))}); simulated"
    )


def seconds(value: float) -> str:
    """``value`` seconds with a unit and four digits at most."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1.0 or unit == "us":
            return f"{value * factor:.4g} {unit}"
    raise AssertionError


def svg(timeline: Timeline, width: int = 1200) -> str:
    """A picture ``width`` pixels wide: computations by rank, below them the transfers that the rank sends
    (thin, from begin to arrival) and its gradient reductions; hatched where it waits for a message."""
    schedule = timeline.program.schedule
    placement, peaks = schedule.placement, activation_peaks(schedule)
    high = _TOP + _ROW * placement.ranks + 34
    inner = width - _LEFT - _RIGHT
    scale = inner / timeline.makespan if timeline.makespan else 0.0

    def x(value: float) -> float:
        return _LEFT + scale * value

    parts = [_legend(timeline)]
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + rank * _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect class="row" x="{_LEFT}" y="{y}" width="{inner}" height="{_BAR}"/>')
        before = 0.0
        for span in spans:
            if span.begin - before > 1e-9 * timeline.makespan:
                wide = scale * (span.begin - before)
                parts.append(
                    f'<rect class="wait" x="{x(before):.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}"/>'
                )
            before = span.end
            parts.append(
                _bar(
                    span.action,
                    placement.chunk(span.action.stage),
                    placement.chunks,
                    x(span.begin),
                    y,
                    scale * (span.end - span.begin),
                )
            )
        parts.append(
            f'<text class="dim" x="{width - _RIGHT + 8}" y="{y + 16}">'
            f"idle {timeline.idle[rank] / timeline.makespan:.0%}, peak {peaks[rank]}</text>"
        )
    for transfer in timeline.transfers:
        y = _TOP + transfer.edge[0] * _ROW + _BAR + 2
        cls = "late" if transfer.stalls > 1e-9 * timeline.makespan else "sent"
        lasts = transfer.arrived - transfer.begin
        about = (
            f"{transfer.action} to rank {transfer.edge[1]}: {seconds(lasts)}, may take "
            f"{seconds(transfer.window)} before it is waited for"
        )
        parts.append(_line(cls, x(transfer.begin), y, max(0.6, scale * lasts), about))
    for reduction in timeline.reductions:
        if reduction.end > reduction.begin:
            y = _TOP + reduction.rank * _ROW + _BAR + 2 + _LANE // 2
            wide = scale * (reduction.end - reduction.begin)
            parts.append(
                _line("reduce", x(reduction.begin), y, wide, f"gradients of stage {reduction.stage}")
            )
    bottom = _TOP + _ROW * placement.ranks + 16
    for tick in range(5):
        at = timeline.makespan * tick / 4
        anchor = "start" if tick == 0 else "end" if tick == 4 else "middle"
        name = seconds(at) if at else "0"
        parts.append(f'<text class="dim" x="{x(at):.1f}" y="{bottom}" text-anchor="{anchor}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" width="{width}" '
        f'height="{high}" role="img" aria-label="{escape(figures(timeline))}">{_STYLE}'
        f"{''.join(parts)}</svg>\n"
    )


_STYLE = (
    "<style>svg{background:#fff}text{font:13px system-ui,sans-serif;fill:#222}.dim{fill:#667}"
    ".num{font-size:11px;text-anchor:middle;fill:#111}.row{fill:#f3f4f6}.wait{fill:url(#hatch)}"
    ".sent{fill:#9aa3b2}.late{fill:#c62828}.reduce{fill:#7b4fb0}.title{font-weight:600}</style>"
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f3f4f6"/>'
    '<rect width="1.6" height="6" fill="#d3d7de"/></pattern></defs>'
)


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    hue, saturation = _HUES[kind]
    light = _LIGHTEST - (_LIGHTEST - _DARKEST) * (chunk / (chunks - 1) if chunks > 1 else 0.4)
    # Numbers rather than hsl(): not every viewer of SVG knows it.
    red, green, blue = (round(255 * part) for part in hls_to_rgb(hue / 360, light / 100, saturation / 100))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _bar(action: Action, chunk: int, chunks: int, x: float, y: int, wide: float) -> str:
    colour = _colour(action.kind, chunk, chunks)
    made = (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}" fill="{colour}" '
        f'stroke="#fff" stroke-width="{0.8 if wide > 3 else 0}"><title>{action}</title></rect>'
    )
    if wide >= _LEAST_LABEL * (1 if action.microbatch < 10 else 1.6):
        made += f'<text class="num" x="{x + wide / 2:.2f}" y="{y + 16}">{action.microbatch}</text>'
    return made


def _line(cls: str, x: float, y: int, wide: float, about: str) -> str:
    return (
        f'<rect class="{cls}" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_LANE // 2}">'
        f"<title>{about}</title></rect>"
    )


def _legend(timeline: Timeline) -> str:
    placement = timeline.program.schedule.placement
    kinds = [Kind.F, Kind.B] + [Kind.W] * bool(timeline.program.schedule.splits_backward)
    names = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
    parts = [f'<text class="title" x="{_LEFT}" y="18">{escape(figures(timeline))}</text>']
    x = _LEFT
    for kind in kinds:
        for chunk in range(placement.chunks):
            parts.append(
                f'<rect x="{x + 12 * chunk}" y="27" width="11" height="11" '
                f'fill="{_colour(kind, chunk, placement.chunks)}"/>'
            )
        x += 12 * placement.chunks + 6
        parts.append(f'<text class="dim" x="{x}" y="37">{names[kind]}</text>')
        x += 8 * len(names[kind]) + 10
    others = [("sent", "transfer"), ("late", "transfer that is waited for")]
    if any(each.end > each.begin for each in timeline.reductions):
        others.append(("reduce", "gradient reduction"))
    for cls, name in others:
        parts.append(f'<rect class="{cls}" x="{x}" y="31" width="14" height="4"/>')
        parts.append(f'<text class="dim" x="{x + 20}" y="37">{name}</text>')
        x += 7 * len(name) + 40
    return "".join(parts)
