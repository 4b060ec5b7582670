"""The tables of a report, for one run or two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rftcore.reporting.console import OutputConsole
from rftcore.reporting.report import Comparison, Gain, Report, evaluation_title
from rftcore.reporting.several_answers import Estimate
from rftdata.attempts.run_models import RunModel
from rftdata.reports.results import CheckpointFolder, Receipts

_KV_CACHE = {"recompute": "recomputed", "keep": "kept"}


def print_report(reports: Sequence[Report], between: Comparison | None = None) -> None:
    """Print one report, or two side by side with the paired difference between them."""
    console = OutputConsole(pipe_width=160)
    for one in reports:
        title = f"Held-out reward of {one.run}, paired by question (± standard error)"
        if one.gains:
            console.print(_gains(one.gains, title, "before", "after"))
        elif not one.not_compared and not one.several_answers:
            console.print(f"{one.run}: no taskset was evaluated.")
        for sentence in one.not_compared:
            console.print(escape(f"{one.run}: {sentence}"))
        if one.several_answers:
            console.print(_several_answers(one))
        for warning in (*one.unscored, *one.warnings):
            console.print(f"[red]warning[/red] {escape(warning)}")
    if between is not None:
        a, b = reports[0].run, reports[1].run
        if between.gains:
            console.print(_gains(between.gains, f"{b} against {a}, each at its best step", a, b))
            for gain in between.gains:
                console.print(escape(f"{gain.taskset}, {gain.decoding}: {_pairing(gain, a, b)}"))
        for sentence in between.not_compared:
            console.print(escape(f"not compared: {sentence}"))
    console.print()
    console.print(_facts(reports))
    for one in reports:
        if one.dropped:
            console.print()
            console.print(_dropped(one))


def _gains(gains: Sequence[Gain], title: str, before: str, after: str) -> Table:
    table = titled(title)
    table.add_column("taskset")
    for name in ("questions", before, after, "difference", "z"):
        table.add_column(name, justify="right")
    for gain in gains:
        error = "" if gain.standard_error is None else f" ± {gain.standard_error:.3f}"
        table.add_row(
            f"{evaluation_title(gain.purpose, gain.taskset)}, {gain.decoding}",
            str(gain.num_questions),
            f"{gain.before:.3f} (step {gain.before_step})",
            f"{gain.after:.3f} (step {gain.after_step})",
            f"{gain.difference:+.3f}{error}",
            "–" if gain.z is None else f"{gain.z:.1f}",
        )
    return table


def _pairing(gain: Gain, a: str, b: str) -> str:
    """Return what a comparison of two runs rests on."""
    interval = "" if gain.interval is None else f"; 95 % interval {gain.interval[0]:+.3f} to {gain.interval[1]:+.3f}"
    p = "" if gain.p is None else f", p = {gain.p:.2g}"
    same = gain.num_questions - gain.num_better - gain.num_worse
    only = [
        f"{name} alone answered {num} further question{'' if num == 1 else 's'}, which do not count"
        for num, name in ((gain.num_only_before, a), (gain.num_only_after, b))
        if num
    ]
    text = f"of {gain.num_questions} questions, {b} is better on {gain.num_better}, worse on {gain.num_worse}, equal on {same}{interval}{p}"
    return "; ".join([text, *only])


def _several_answers(one: Report) -> Table:
    """Return the table of evaluations with several answers to a question; best@k for the largest k alone, the others are in the JSON."""
    table = titled(
        f"Answers of {one.run} (± standard error over questions; an answer passes from a reward of {one.several_answers[0].pass_reward:g})"
    )
    table.add_column("taskset")
    for name in ("step", "questions", "answers each", "mean@n"):
        table.add_column(name, justify="right")
    ks = sorted({k for each in one.several_answers for k in each.pass_at})
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    table.add_column("best@n", justify="right")
    for each in one.several_answers:
        table.add_row(
            f"{evaluation_title(each.purpose, each.taskset)}, {each.decoding}",
            str(each.trainer_step),
            str(each.num_questions),
            str(each.num_answers),
            _estimate(each.mean),
            *(_estimate(each.pass_at[k]) if k in each.pass_at else "–" for k in ks),
            _estimate(each.best_at[max(each.best_at)]),
        )
    return table


def _estimate(estimate: Estimate) -> str:
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.3f}"
    return f"{estimate.value:.3f}{error}"


def _facts(reports: Sequence[Report]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=len(reports) > 1, padding=(0, 2, 0, 0))
    table.add_column("")
    for one in reports:
        table.add_column(one.run, overflow="fold")
    columns = [dict(_fact_lines(one)) for one in reports]
    # A line that only one run has is placed as in that run.
    names = max(columns, key=len) | {name: "" for column in columns for name in column}
    for name in names:
        table.add_row(Text(name, "bold"), *(Text(column.get(name, "–")) for column in columns))
    return table


def _facts_of_evaluations(one: Report) -> list[tuple[str, str]]:
    """Return the facts about a run that only evaluates."""
    origins = [_origin(model) for model in one.models if model.used_as == "policy"]
    return [
        ("status", one.status + (f": {one.outcome}" if one.outcome else "")),
        ("model", ", ".join(origins) or one.model),
        ("checksum", ", ".join(dict.fromkeys(each.checksum for each in one.several_answers)) or "–"),
        ("time", _seconds(one.wall_seconds)),
        ("tokens", f"{one.evaluated_tokens:,} for evaluation"),
        ("buffer", one.buffer),
    ]


def _fact_lines(one: Report) -> list[tuple[str, str]]:
    if one.mode == "eval":
        return _facts_of_evaluations(one)
    steps, groups = one.steps, one.groups
    still = (
        f", {steps.without_gradient} without a gradient (these did not change the weights; groups with equal rewards give no gradient)"
        if steps.without_gradient
        else ""
    )
    skipped = f", {steps.skipped} skipped ({'; '.join(steps.skipped_because)})" if steps.skipped else ""
    forked = f", {steps.before_fork} of them before the fork" if steps.before_fork else ""
    attempts = f" in {one.num_attempts} attempts" if one.num_attempts > 1 else ""
    rate = "" if one.tokens_per_s is None else f" ({one.tokens_per_s:,.0f} a second over the whole run)"
    planned = f"{groups.planned} planned ({groups.refilled} refills)"
    closed = f" ({_counts(groups.closed_because)})" if groups.closed else ""
    trainer = (
        f"waited {_seconds(steps.wait_seconds)}, trained {_seconds(steps.train_seconds)}, "
        f"published {_seconds(steps.publish_seconds)}"
    )
    learned = ("training reward", _first_to_last([p.mean for p in one.train_curve]))
    if "loss" in one.metric_curves and not one.train_curve:
        learned = ("training loss", _metric(one, "loss"))
    return [
        ("status", one.status + (f": {one.outcome}" if one.outcome else "")),
        ("model", f"{one.model}, {one.algorithm}, seed {one.seed}"),
        *[(f"{model.used_as} model", _origin(model)) for model in one.models if model.used_as != "policy"],
        ("steps", f"{steps.done} of {steps.planned}{forked}{skipped}{still}{attempts}"),
        ("time", f"{_seconds(one.wall_seconds)}; the trainer {trainer}"),
        *_time_lines(one),
        ("tokens", f"{one.sampled_tokens:,} sampled for training{rate}, {one.evaluated_tokens:,} for evaluation"),
        learned,
        *_part_lines(one),
        *([("critic", f"value loss {_metric(one, 'value_loss')}")] if "value_loss" in one.metric_curves else []),
        *(
            [("explained variance", _metric(one, "explained_variance"))]
            if "explained_variance" in one.metric_curves
            else []
        ),
        *([("pair accuracy", _metric(one, "pair_accuracy"))] if "pair_accuracy" in one.metric_curves else []),
        ("experiences", f"{one.num_experiences:,}; rollouts: {_counts(one.rollouts)}"),
        *([("turns", _turns(one))] if one.forks or one.num_turns > one.num_experiences else []),
        *(
            [("failed rollouts", "; ".join(f"{num} × {error}" for error, num in one.failed_because.items()))]
            if one.failed_because
            else []
        ),
        *([("sandbox", "; ".join(one.sandboxes))] if one.sandboxes else []),
        ("groups", f"{planned}, {groups.trained} trained on, {groups.closed} closed{closed}"),
        *[(f"live weights, KV cache {_KV_CACHE[receipts.kv_cache]}", _receipts(receipts)) for receipts in one.receipts],
        ("best checkpoint", _checkpoint(one.best_checkpoint, one.best_step)),
        ("last checkpoint", _checkpoint(one.last_checkpoint, None)),
        ("buffer", one.buffer),
    ]


def _part_lines(one: Report) -> list[tuple[str, str]]:
    """Return a row for each part of the training reward; none if it has a single part, which is the reward itself."""
    if len(one.part_curves) < 2:
        return []
    return [(f"reward {name}", _first_to_last([p.mean for p in points])) for name, points in one.part_curves.items()]


def _time_lines(one: Report) -> list[tuple[str, str]]:
    """Return the rows of what each role spent its time on, in percent."""
    lines = []
    for role in ("trainer", "explorer", "pipeline"):
        activities = [each for each in one.activities if each.role == role]
        total = sum(each.seconds for each in activities)
        if total > 0:
            shares = ", ".join(f"{each.activity} {100 * each.seconds / total:.0f} %" for each in activities)
            lines.append((f"time of {role}", shares))
    return lines


def _receipts(receipts: Receipts) -> str:
    if receipts.mean_pause_s is None or receipts.max_pause_s is None:
        return f"{receipts.num_applied:,} applied, {receipts.num_failed:,} failed"
    return (
        f"{receipts.num_applied:,} applied, {receipts.num_failed:,} failed; engines paused for {1000 * receipts.mean_pause_s:,.0f} ms each "
        f"(up to {1000 * receipts.max_pause_s:,.0f})"
    )


def _turns(one: Report) -> str:
    return f"{one.num_turns:,} in {one.num_experiences:,} experiences, {one.observed_tokens:,} tokens between them; forks: {_counts(one.forks)}"


def _metric(one: Report, name: str) -> str:
    return _first_to_last([measure.value for measure in one.metric_curves[name]])


def _origin(model: RunModel) -> str:
    trained = "" if model.trained_by is None else f"step {model.trainer_step} of {model.trained_by}: "
    return f"{trained}{model.uri}"


def _first_to_last(values: Sequence[float]) -> str:
    """Return the means of the first and of the last steps."""
    if not values:
        return "–"
    width = max(1, min(10, len(values) // 2))
    first, last = (sum(part) / width for part in (values[:width], values[-width:]))
    return f"{first:.3f} (first {width} steps) to {last:.3f} (last {width})"


def _checkpoint(checkpoint: CheckpointFolder | None, step: int | None) -> str:
    if checkpoint is None:
        return "none" if step is None else f"step {step} is best; its files are not kept"
    return f"step {checkpoint.trainer_step}: {checkpoint.uri}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{num} {name}" for name, num in counts.items()) or "none"


def _dropped(one: Report) -> Table:
    table = titled(f"Experiences dropped in {one.run}")
    table.add_column("rows", justify="right")
    table.add_column("groups", justify="right")
    table.add_column("stage")
    table.add_column("reason", overflow="fold")
    for drop in one.dropped:
        table.add_row(str(drop.num_experiences), str(drop.num_groups), Text(drop.stage), Text(drop.reason))
    return table


def titled(title: str) -> Table:
    """Return an empty table under a title, without lines."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _seconds(seconds: float | None) -> str:
    """Format seconds as `7 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
