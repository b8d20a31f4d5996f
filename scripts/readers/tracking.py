"""Reads a run directory with each project's own reader and compares every point with metrics.jsonl.

usage: tracking.py RUN tensorboard|wandb|swanlab|mlflow
"""

import glob
import json
import os
import struct
import sys


def expected(run):
    """{name: {step: value}} of metrics.jsonl, named as trackers name them."""
    points = {}

    def add(group, step, record):
        for key, value in record.items():
            if isinstance(value, dict):
                add(f"{group}/{key}", step, value)
                continue
            values = {f"_{i + 1}": v for i, v in enumerate(value)} if isinstance(value, list) else {"": value}
            for number, value in values.items():
                if key != "step" and isinstance(value, (int, float)):
                    name = key.split("_by_")[0] if number else key
                    points.setdefault(f"{group}/{name}{number}", {})[step] = float(value)

    for line in open(f"{run}/metrics.jsonl"):
        record = json.loads(line)
        held_out = record.pop("held_out", None)
        add("held_out", record["step"], held_out) if held_out else add("train", record["step"], record)
    return points


def tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(run, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    config = board.Tensors("config")
    assert b'"target"' in config[0].tensor_proto.string_val[0]
    points = {}
    for tag in board.Tags()["scalars"]:
        events = board.Scalars(tag)
        points[tag] = {event.step: event.value for event in events}
        assert len(points[tag]) == len(events), f"{tag}: double points"
    return points


def wandb(run):
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = glob.glob(f"{run}/wandb/offline-run-*/run-*.wandb")
    store = DataStore()
    store.open_for_scan(path)
    points, kinds = {}, []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kinds.append(record.WhichOneof("record_type"))
        assert record.num == len(kinds)
        if kinds[-1] == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert os.path.basename(run) == os.path.basename(config["output"]), config
            assert os.path.basename(path) == f"run-{record.run.run_id}.wandb"
        if kinds[-1] == "history":
            for item in record.history.item:
                if not item.key.startswith("_"):
                    series = points.setdefault(item.key, {})
                    assert record.history.step.num not in series, "double points"
                    series[record.history.step.num] = json.loads(item.value_json)
    assert kinds[:2] == ["header", "run"] and kinds[-1] == "exit" and "summary" in kinds, kinds
    return points


def swanlab(run):
    from swanlab.proto.swanlab.metric.column.v1.column_pb2 import ColumnType
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader
    import yaml

    (path,) = glob.glob(f"{run}/swanlog/run-*/run-*.swanlab")
    store = DataStoreReader()
    store.open(path)
    points, kinds = {}, []
    while (data := store.scan()) is not None:
        record = Record()
        record.ParseFromString(data)
        kinds.append(record.WhichOneof("record_type"))
        if kinds[-1] == "save":
            config = yaml.safe_load(record.save.payload)
            rate = config["schedule"]["value"]["learning_rate"]
            assert isinstance(rate, float), rate
        if kinds[-1] == "column":
            points[record.column.column_key] = {}
        if kinds[-1] == "scalar":
            scalar = record.scalar
            assert scalar.type == ColumnType.COLUMN_TYPE_SCALAR and scalar.step not in points[scalar.key]
            points[scalar.key][scalar.step] = scalar.value.number
    assert kinds[:2] == ["start", "save"] and kinds[-1] == "finish", kinds
    return points


def mlflow(run):
    from mlflow.tracking import MlflowClient

    state = json.load(open(f"{run}/mlflow.json"))
    client = MlflowClient(state["server"])
    found = client.get_run(state["run_id"])
    assert found.info.status == "FINISHED", found.info.status
    assert found.data.params["train.rows_per_step"], found.data.params
    points = {}
    for key in found.data.metrics:
        history = client.get_metric_history(state["run_id"], key)
        points[key] = {metric.step: metric.value for metric in history}
        assert len(points[key]) == len(history), f"{key}: double points"
    return points


def main(run, reader):
    want, found = expected(run), globals()[reader](run)
    if reader == "tensorboard":  # single precision
        want = {k: {s: struct.unpack("f", struct.pack("f", x))[0] for s, x in v.items()} for k, v in want.items()}
    # A resumed run repeats all but its speed, which is that of the first time on a server.
    for points in (want, found):
        points.pop("train/tokens_per_second", None)
    assert want.keys() == found.keys(), want.keys() ^ found.keys()
    for name in want:
        wrong = [step for step, _ in want[name].items() ^ found[name].items()]
        assert not wrong, f"{name} differs at steps {sorted(set(wrong))[:10]}"
    print(f"{reader}: {len(found)} series, {sum(map(len, found.values()))} points equal metrics.jsonl")


main(*sys.argv[1:])
