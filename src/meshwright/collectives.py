"""Collectives in the public API: schedules of collective algorithms, proved, counted, simulated and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.arguments import as_list
from meshwright.core.errors import CheckFailedError, Problem, UserError, require_argument
from meshwright.runs.reporter import SILENT, Reporter

if TYPE_CHECKING:
    from meshwright.runs.collective_bench import CollectiveBench
    from meshwright.schedule.collective.contributors import Transfer
    from meshwright.schedule.collective.proof import Proof
    from meshwright.schedule.collective.steps import CollectiveSchedule
    from meshwright.schedule.collective.traffic import Traffic
    from meshwright.simulate.collective import CollectiveTimes
    from meshwright.simulate.collective_choice import CollectiveComparison
    from meshwright.spec.cluster import Cluster
    from meshwright.validation.collectives import CollectiveValidation

DEFAULT_BYTES = 1_000_000


def build_collective(
    op: str,
    algorithm: str,
    ranks: int,
    *,
    root: int = 0,
    ranks_per_node: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    order: Sequence[int] | None = None,
    segments: int = 1,
) -> CollectiveSchedule:
    """Generate the schedule of a collective.

    Args:
        op: ``broadcast``, ``scatter``, ``gather``, ``all_gather``, ``reduce``, ``reduce_scatter``,
            ``all_reduce`` or ``all_to_all``.
        algorithm: ``naive``, ``ring``, ``tree``, ``double_tree``, ``recursive_doubling``,
            ``halving_doubling``, ``hierarchical`` or ``2d``; not every operation has every algorithm.
        ranks: Number of ranks.
        root: Root of broadcast, scatter, gather and reduce.
        ranks_per_node: Ranks per node of ``hierarchical``, and the row length of ``2d``.
        groups: The ranks of each node, instead of ``ranks_per_node``.
        order: The ranks in ring order, of the algorithms without groups.
        segments: Segments that are pipelined along a chain or tree.

    Raises:
        UserError: The operation, the algorithm or their pair is unknown, or a size does not fit.
    """
    from meshwright.schedule.collective.build import build_collective as build  # noqa: PLC0415

    return build(
        op,
        algorithm,
        ranks,
        root=root,
        ranks_per_node=ranks_per_node,
        groups=groups,
        order=order,
        segments=segments,
    )


def bench_collectives(
    *,
    ranks: int | None = None,
    ops: str | Sequence[str] = (),
    algorithms: str | Sequence[str] | None = None,
    sizes: int | Sequence[int] = (),
    budget_s: float = 120.0,
    cpu: bool = False,
    reporter: Reporter = SILENT,
) -> CollectiveBench:
    """Measure collectives between real ranks of this machine: ours and the backend's, over its transports.

    Args:
        ranks: Number of ranks; the GPUs or CPU cores of this machine, at least 2, if left out.
        ops: Operations; all-reduce, reduce-scatter, all-gather, broadcast and all-to-all if empty.
        algorithms: Our algorithms; ``ring``, ``tree`` and ``halving_doubling`` if left out. An empty
            list: none.
        sizes: Bytes of the larger tensor; 1 KiB to 256 MiB if empty.
        budget_s: Time for all; what does not fit is skipped.
        cpu: Measure the CPU even if there are GPUs.
        reporter: Receives the progress.

    Raises:
        UserError: An argument does not fit, or there are too few GPUs.
        RunFailedError: A rank died.
    """
    from meshwright.runs.collective_bench import bench_collectives as bench  # noqa: PLC0415

    ours: list[str] | None = None if algorithms is None else as_list(algorithms)
    return bench(ranks, as_list(ops), ours, as_list(sizes), budget_s, cpu, reporter)


def prove_collective(
    schedule: CollectiveSchedule, size_bytes: int = DEFAULT_BYTES, on: str | None = None
) -> ProvedCollective:
    """Prove a schedule, count its steps and bytes, and simulate it on a cluster.

    Args:
        schedule: From :func:`build_collective`.
        size_bytes: Size of the tensor; the larger of input and output.
        on: A cluster such as ``2x8xh100-sxm`` to simulate it on.

    Raises:
        UserError: The size or the cluster does not fit.
        CheckFailedError: It is not correct; the error lists the violations with rank and step.
    """
    from meshwright.schedule.collective.proof import prove_collective as prove  # noqa: PLC0415
    from meshwright.schedule.collective.traffic import count_traffic  # noqa: PLC0415

    require_argument(size_bytes >= 0, "size_bytes", size_bytes, "must be 0 or more")
    proof = prove(schedule)
    if not proof.proved:
        raise CheckFailedError(*(Problem("collective-not-proved", str(found)) for found in proof.violations))
    times = None if on is None else _simulate(schedule, size_bytes, on)
    return ProvedCollective(schedule, proof, count_traffic(schedule, size_bytes), size_bytes, times)


def compare_collectives(
    op: str = "all_reduce",
    on: str = "2x8xh100-sxm",
    *,
    ranks: int | Sequence[int] = (),
    sizes: int | Sequence[int] = (),
    algorithms: str | Sequence[str] = (),
) -> CollectiveComparison:
    """Simulate every algorithm of an operation over sizes and numbers of ranks.

    Args:
        op: The operation.
        on: The cluster.
        ranks: Numbers of ranks; powers of two up to 64 or the whole cluster if left out.
        sizes: In bytes; 1 KiB to 1 GiB if left out.
        algorithms: Only these; all that the operation has if left out.

    Raises:
        UserError: An argument does not fit.
    """
    from meshwright.simulate.collective_choice import SIZES, compare_algorithms  # noqa: PLC0415

    return compare_algorithms(
        op, _load_cluster(on), as_list(ranks), as_list(sizes) or SIZES, as_list(algorithms)
    )


def validate_collectives() -> CollectiveValidation:
    """Predict published NCCL all-reduce times on numbers of ranks that nothing was fitted on."""
    from meshwright.validation.collectives import validate_curves  # noqa: PLC0415

    return validate_curves()


def draw_comparison(found: CollectiveComparison, path: str | Path) -> None:
    """Draw which algorithm is fastest into an SVG, PNG or PDF file. Needs the extra ``plots``."""
    from meshwright.report.collective_plot import draw_comparison as draw  # noqa: PLC0415
    from meshwright.report.figure import require_picture, save_figure  # noqa: PLC0415

    require_picture(Path(path))
    save_figure(draw(found), Path(path))


@dataclass(frozen=True)
class ProvedCollective:
    """A proved schedule with its counts. Made by :func:`prove_collective`."""

    schedule: CollectiveSchedule
    proof: Proof
    traffic: Traffic
    """Bytes per rank."""
    size_bytes: int
    times: CollectiveTimes | None
    """On the cluster, if one was given."""

    @property
    def transfers(self) -> list[list[Transfer]]:
        """The messages of each round."""
        from meshwright.schedule.collective.contributors import list_transfers  # noqa: PLC0415

        return list_transfers(self.schedule)

    def draw(self, path: str | Path) -> None:
        """Draw the schedule step by step into an SVG, PNG or PDF file. Needs the extra ``plots``.

        Raises:
            UserError: It has too many ranks for a picture, or the file cannot be written.
        """
        from meshwright.report.collective_plot import MOST_RANKS, draw_collective  # noqa: PLC0415
        from meshwright.report.figure import require_picture, save_figure  # noqa: PLC0415

        require_picture(Path(path))
        if self.schedule.ranks > MOST_RANKS:
            rule, fix = f"is too many for a picture; {MOST_RANKS} at most", "Draw fewer ranks"
            raise UserError(
                Problem("collective-picture", rule, "ranks", self.schedule.ranks, fix, is_argument=True)
            )
        save_figure(draw_collective(self.schedule), Path(path))

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright schedule collective --json``."""
        schedule = self.schedule
        actions = [
            [
                {
                    "round": step.round,
                    "sends": [send._asdict() for send in step.sends],
                    "receives": [receive._asdict() for receive in step.receives],
                }
                for step in row
            ]
            for row in schedule.rows
        ]
        return {
            "op": schedule.op.value,
            "algorithm": schedule.algorithm,
            "ranks": schedule.ranks,
            "root": schedule.root,
            "groups": [list(group) for group in schedule.groups],
            "chunks": schedule.chunks,
            "size_bytes": self.size_bytes,
            "actions": actions,
            "steps": self.proof.steps,
            "messages": self.proof.messages,
            "bytes_per_rank": list(self.traffic.sent),
            "received_bytes_per_rank": list(self.traffic.received),
            "reduced_bytes_per_rank": list(self.traffic.reduced),
            "time_s": None if self.times is None else self.times.time_s,
            "proved": self.proof.proved,
        }


def _load_cluster(on: str) -> Cluster:
    """A cluster by its name, through the checks of a job."""
    from meshwright.spec.load import load_job  # noqa: PLC0415

    return load_job("demo-2m", on=on, to_run=False).cluster


def _simulate(schedule: CollectiveSchedule, size_bytes: int, on: str) -> CollectiveTimes:
    from meshwright.simulate.collective import simulate_collective  # noqa: PLC0415
    from meshwright.simulate.collective_links import build_links  # noqa: PLC0415

    cluster = _load_cluster(on)
    if schedule.ranks > cluster.world_size:
        rule = f"has {cluster.world_size} devices, fewer than ranks={schedule.ranks}"
        fix = "Use more nodes or fewer ranks"
        raise UserError(Problem("collective-cluster", rule, "on", on, fix, is_argument=True))
    return simulate_collective(schedule, size_bytes, build_links(cluster, schedule.ranks))
