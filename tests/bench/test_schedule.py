"""The cost of schedules."""

import json

import torch

from bench import schedule
from bench.shapes import load


def test_builders_take_what_the_backends_would():
    rows = {row.name: row for row in load()}
    broadcast = schedule.builders(rows["b1024_q192_h3_d128_k1000_s0.5"])
    assert set(broadcast) == {"dealt_tiles", "dealt_keys", "statistic_tiles"}
    dealt = broadcast["dealt_tiles"](torch.tensor([5, 0, 900]))
    assert dealt.table.shape == (6, 9)  # a tile of 192 queries for each of 3 heads
    windowed = schedule.builders(rows["window_256"])
    assert set(windowed) == {"dealt_tiles", "dealt_keys", "statistic_tiles"}
    few = schedule.builders(rows["b1024_q64_h4_d128_k512_s0.5"])
    assert set(few) == {"dealt_tiles", "key_segments"}
    assert few["key_segments"](torch.full((100,), 500)).workers == 33
    (row,) = windowed["dealt_tiles"](torch.tensor([1000])).table[-1:].tolist()
    assert row[3] - row[2] < 1000  # the window is there
    short, few = torch.full((200,), 256), torch.full((9,), 256)
    for kinds, lengths, whole in (
        (schedule.builders(rows["self_k256_s0.5"]), short, True),
        (schedule.builders(rows["self_k256_s0.5"]), few, False),
        (windowed, short, False),
        (broadcast, short, False),
    ):
        dealt = kinds["dealt_keys"](lengths)
        assert bool(dealt.table[:, 9].any()) is whole
        begin = kinds["statistic_tiles"](lengths)[:, 2]
        # Shared queries have the sums of the first sample alone.
        assert (begin[0] if kinds is broadcast else begin).eq(0 if whole else 1).all()


def test_the_command_writes_figures(tmp_path, capsys):
    out = tmp_path / "schedule.json"
    schedule.main(["--rows", "dense_4096", "self_k256*", "--builds", "3", "--out", str(out)])
    written = json.loads(out.read_text())
    assert [entry["name"] for entry in written["rows"]] == ["self_k256_s0.5", "dense_4096"]
    assert written["rows"][1]["tiles"] == 8 * 16 * 4096 // 128
    for entry in written["rows"]:
        assert set(entry["ms"]) == {"dealt_tiles", "dealt_keys", "statistic_tiles"}
        assert all(0 < ms < 1e4 for ms in entry["ms"].values())
    assert "self_k256_s0.5" in capsys.readouterr().out
