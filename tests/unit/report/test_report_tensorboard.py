"""TensorBoard files have the values of the events, read with TensorBoard's own reader."""

from __future__ import annotations

import warnings

from meshwright.report.tensorboard import FOLDER, TensorBoardSink


def test_tensorboard_scalars_equal_the_events(tmp_path):
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        facts = {"loss": 6.0 - step, "lr": 0.1, "grad_norm": None, "tokens_per_s": 100.0, "mfu": 0.5}
        sink.feed({"event": "step", "rank": 0, "time": float(step), "step": step, **facts})
        sink.feed({"event": "step", "rank": 1, "time": float(step), "step": step, "loss": -1.0})
    sink.feed({"event": "eval", "rank": 0, "time": 4.0, "step": 3, "loss": 3.5})
    sink.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of TensorBoard's reader
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        curves = EventAccumulator(str(tmp_path / FOLDER)).Reload()
    assert [(e.step, e.value) for e in curves.Scalars("loss/train")] == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert [(e.step, e.value) for e in curves.Scalars("loss/eval")] == [(3, 3.5)]
    assert "optimizer/grad_norm" not in curves.Tags()["scalars"], "missing values have no curve"
