"""Benchmarks: what they count, how they print, and that they run. No speed is asserted."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from app.engine.outputs import SequenceDelta
from benchmarks import bench_engine, bench_serve, compare, engine_methods
from benchmarks.draft_cost import arithmetic_share, target_ms
from benchmarks.engine_report import count_equal
from benchmarks.engine_runs import COUNTS, EngineRunner, difference
from benchmarks.first_layers import keep_first_layers
from benchmarks.machine import process_tree, process_tree_memory, read_bandwidth
from benchmarks.operators import StepShape, TorchOperators, decode_shape, step_weight_bytes
from benchmarks.peer_process import PEERS
from benchmarks.report import format_table, last_json, paired_ratio, quantile
from benchmarks.workloads import WORKLOADS, PromptSet, matching_prefix, read_prompts, select_workloads
from models.config import read_model_config
from models.loader import load_model

REPOSITORY = Path(__file__).resolve().parent.parent


def test_table_columns_line_up():
    table = format_table(
        ["workload", "method", "tokens/s"], [["1-open", "plain", "9.5"], ["32-copy", "ngram", "1234.0"]]
    )
    assert table.splitlines() == [
        "workload  method  tokens/s",
        "--------  ------  --------",
        "1-open    plain        9.5",
        "32-copy   ngram     1234.0",
    ]
    with pytest.raises(AssertionError, match="every row needs a cell"):
        format_table(["a", "b"], [["only one"]])


def test_ratio_is_taken_within_rounds():
    assert paired_ratio([10.0, 40.0, 90.0], [5.0, 20.0, 90.0]) == 2.0  # of the medians it would be 40 / 20, too:
    assert paired_ratio([10.0, 99.0, 30.0], [5.0, 50.0, 10.0]) == 2.0  # here 30 / 10
    assert paired_ratio([], []) is None


def test_quantile_is_the_smallest_value_that_covers_the_share():
    values = [float(v) for v in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 50.0, 95.0, 100.0]
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([], 0.5) is None


def test_last_json_reads_the_last_line_only():
    assert last_json('a table\n{"old": 1}\n{"benchmark": "engine"}\n') == {"benchmark": "engine"}
    for output in ("", "a table", '{"a": 1}\ntrailing words', "[1]"):
        with pytest.raises(ValueError):  # noqa: PT011 - json's own errors are ValueErrors, too
            last_json(output)


def test_workloads_bring_waves_of_their_width_and_references():
    prompts = PromptSet()
    for name, workload in WORKLOADS.items():
        waves = prompts.waves(workload)
        assert [len(wave) for wave in waves] == ([1] * 4 if name.startswith("1-") else [workload.num_streams])
        references = prompts.references(workload)
        assert references is not None
        assert len(references) == sum(map(len, waves))
        assert all(0 < len(reference) <= 128 for reference in references)
    assert {len(prompt) for prompt in prompts.long_prompts} == {512}


def test_prompts_are_folded_into_another_vocabulary_and_lose_their_references():
    prompts = PromptSet(vocab_size=300)
    waves = prompts.waves(WORKLOADS["8-open"])
    assert max(token_id for wave in waves for prompt in wave for token_id in prompt) < 300
    assert prompts.references(WORKLOADS["8-open"]) is None


def test_given_prompts_take_the_place_of_ours_and_come_again_shorter(tmp_path):
    given = [[number] * 8 for number in range(24)]
    prompts, workloads = PromptSet(300, given), select_workloads(None, quick=False, given=True)
    assert [workload.name for workload in workloads] == ["1-given", "8-given", "32-given"]
    assert prompts.waves(workloads[0]) == [[prompt] for prompt in given[:4]]
    (wave,) = prompts.waves(workloads[2])
    assert wave == given + [prompt[:6] for prompt in given[:8]]
    assert prompts.references(workloads[2]) is None
    (lonely,) = PromptSet(300, [[5, 6]]).waves(workloads[2])
    assert lonely == [[5, 6]] + 31 * [[5]]

    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompt_ids": given}))
    assert read_prompts(path, 24) == given
    with pytest.raises(ValueError, match="token ids, below the model's vocab_size, 23"):
        read_prompts(path, 23)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"--prompts is .*prompts.json, which holds no prompt_ids"):
        read_prompts(path, 24)


def test_unknown_workload_is_refused_by_name():
    with pytest.raises(ValueError, match="names 2-open: choose from 1-open"):
        select_workloads(["1-open", "2-open"], quick=False)
    with pytest.raises(ValueError, match="names 1-open: choose from 1-given"):
        select_workloads(["1-open"], quick=False, given=True)


def test_outputs_count_as_equal_as_far_as_both_go():
    assert [matching_prefix([1, 2, 3], other) for other in ([1, 2, 4], [1, 2], [9])] == [2, 2, 0]
    assert count_equal([[1, 2, 3], [1, 2], [7]], [[1, 2], [1, 9], [7]]) == 2


class ScriptedEngine:
    """Two streams of one wave: the second's first token comes a step later, and then both draft."""

    def __init__(self) -> None:
        self._requests: list[str] = []
        self._script = [{0: [1]}, {0: [2], 1: [3]}, {0: [4, 5, 6], 1: [7, 8]}]
        self._stats = dict.fromkeys(COUNTS, 0) | {"drafted_per_position": [], "accepted_per_position": []}

    @property
    def has_work(self) -> bool:
        return bool(self._script)

    def add_request(self, request) -> None:
        assert request.sampling_params.ignore_eos
        self._requests.append(request.request_id)

    def stats(self) -> dict:
        return {name: list(value) if isinstance(value, list) else value for name, value in self._stats.items()}

    def step(self) -> list[SequenceDelta]:
        emitted = self._script.pop(0)
        self._stats["num_steps"] += 1
        self._stats["num_verifications"] += len(emitted)
        self._stats["forward_s"] += 0.25
        if not self._script:
            self._stats["drafted_per_position"], self._stats["accepted_per_position"] = [2, 2], [2, 1]
        return [SequenceDelta(self._requests[i], 0, token_ids=token_ids) for i, token_ids in emitted.items()]


def test_decode_figures_begin_with_the_last_streams_first_token():
    run = EngineRunner(ScriptedEngine()).run([[[1], [2]]], num_new_tokens=5)
    assert run.token_ids == [[1, 2, 4, 5, 6], [3, 7, 8]]
    assert run.num_decode_tokens == 5
    assert (run.num_steps, run.num_verifications) == (1, 2)
    assert run.mean_acceptance_length == 2.5
    assert run.acceptance_by_position == [1.0, 0.5]
    assert run.first_token_s[0] < run.first_token_s[1] <= run.wall_s
    assert run.step_ms["forward"] == 250.0
    assert run.step_ms["total"] == pytest.approx(1e3 * run.decode_s)


def test_difference_of_stats_follows_lists_that_grew():
    before = dict.fromkeys(COUNTS, 0) | {"num_steps": 3, "forward_s": 1.0, "kv_usage": 0.5}
    before |= {"drafted_per_position": [], "accepted_per_position": [1]}
    after = before | {"num_steps": 7, "forward_s": 2.5, "accepted_per_position": [4, 2], "kv_usage": 0.25}
    counts = difference(after, before)
    assert {name: count for name, count in counts.items() if count} == {
        "num_steps": 4,
        "forward_s": 1.5,
        "accepted_per_position": [3, 2],
    }


def test_memory_covers_descendants():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pids = process_tree(os.getpid())
        memory = process_tree_memory(os.getpid())
        child.communicate(b"\n")
    assert child.pid in pids
    assert memory.num_processes >= 2
    assert 10 * 2**20 < memory.largest_peak_rss_bytes < memory.peak_rss_bytes
    with pytest.raises(ValueError, match="no such process"):
        process_tree_memory(child.pid)


def test_read_bandwidth_is_a_rate_of_this_world():
    assert 1e8 < read_bandwidth(torch.device("cpu"), num_repeats=1, num_bytes=2**22) < 1e13


def test_torch_operators_sum_to_their_total(tiny_checkpoint):
    config = read_model_config(tiny_checkpoint("llama"))
    operators = TorchOperators(config, torch.float32, torch.device("cpu"))
    for shape in (decode_shape(2.6, 4.9, 40.2), StepShape(1, 16, 16, 1)):
        times = operators.times_ms(shape, num_repeats=1)
        assert all(time_ms > 0 for time_ms in times.values())
        assert times["total"] == pytest.approx(sum(time_ms for name, time_ms in times.items() if name != "total"))
    assert decode_shape(2.6, 4.9, 40.2) == StepShape(3, 5, 41, 5)


def test_step_weights_are_the_layers_and_the_head(tiny_checkpoint):
    config = read_model_config(tiny_checkpoint("llama"))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert step_weight_bytes(config, torch.bfloat16) == 2 * (2 * layer + 300 * 64)


def test_engine_benchmark_runs_methods_in_turn(tiny_checkpoint, tmp_path, capsys):
    model = tiny_checkpoint("llama", max_position_embeddings=1024)
    out = tmp_path / "result.json"
    options = ["--model", str(model), "--device", "cpu", "--quick", "--no-startup", "--new-tokens", "6"]
    options = bench_engine.parse_arguments([*options, "--methods", "plain", "ngram", "--json", str(out)])
    result = bench_engine.run(options)
    bench_engine.print_json(result, out)
    output = capsys.readouterr().out
    printed = last_json(output)
    assert printed == json.loads(out.read_text())
    assert output.startswith("machine")
    assert printed["machine"]["commit"] in output
    assert list(printed["methods"]) == ["plain", "ngram"]
    for method in printed["methods"].values():
        assert list(method["workloads"]) == ["1-open", "8-copy"]
        for cell in method["workloads"].values():
            assert cell["num_equal_to_baseline"] == cell["num_prompts"]  # fp32: drafts change nothing
            assert cell["num_equal_to_reference"] is None
            phases = {name: time_ms for name, time_ms in cell["step_ms"].items() if name != "total"}
            assert sum(phases.values()) == pytest.approx(cell["step_ms"]["total"])
    plain, ngram = (printed["methods"][method]["workloads"]["8-copy"] for method in ("plain", "ngram"))
    assert (plain["ratio"], plain["mean_acceptance_length"], plain["num_decode_steps"]) == (1.0, 1.0, 5)
    assert ngram["mean_acceptance_length"] >= 1.0


def test_engine_benchmark_of_mtp_says_what_drafting_costs(tiny_checkpoint, tmp_path, capsys):
    model = tiny_checkpoint("deepseek_v3", max_position_embeddings=1024, num_nextn_predict_layers=1)
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompt_ids": [[1, 50, 60 + number] for number in range(8)]}))
    options = ["--model", str(model), "--device", "cpu", "--quick", "--no-startup", "--new-tokens", "6"]
    options += ["--prompts", str(path), "--methods", "plain", "mtp:2"]
    result = bench_engine.run(bench_engine.parse_arguments(options))
    assert "by arithmetic" in capsys.readouterr().out
    plain, mtp = (result["methods"][method]["workloads"]["8-given"] for method in ("plain", "mtp:2"))
    assert "draft_cost" not in plain
    assert mtp["num_equal_to_baseline"] == mtp["num_prompts"] == 8
    assert len(mtp["acceptance_by_position"]) == 2
    assert mtp["torch_operators_ms"] is None  # of dense models only
    cost = mtp["draft_cost"]
    assert cost["pass_share"] == mtp["step_ms"]["propose"] / 2 / plain["step_ms"]["forward"]
    assert cost["rows_share"] > 0
    assert 0 < cost["share_of_step"] < 1


def test_drafting_is_set_beside_the_targets_passes_over_as_many_rows():
    """One row costs 10 ms and four cost 16: a pass over the 2.5 that were kept, two over one; three of sampling."""
    plain, step = {"forward": 10.0, "verify": 1.0}, {"forward": 16.0, "verify": 2.0}
    assert target_ms(plain, step, num_kept=2.5, k=3, num_modules=1) == 13 + 2 * 10 + 3
    assert target_ms(plain, step, num_kept=2.5, k=3, num_modules=2) == 2 * 13 + 2 * 10 + 3


def test_the_arithmetic_of_a_draft_is_that_of_a_modules_row(tiny_checkpoint):
    """By hand: rows are multiplied with attention, three of eight experts, a shared one, router and norms."""
    config = read_model_config(tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=1))
    attention = 64 * (24 + 40) + 24 * 4 * 24 + 32 * 4 * 28 + 4 * 12 * 64 + 24 + 32
    experts = (3 + 1) * 3 * 64 * 20 + 8 * 64 + 8
    target = 2 * (attention + 2 * 64) + 3 * 64 * 96 + experts + 64
    module = attention + 2 * 64 + experts + 2 * 64 * 64 + 3 * 64
    head = 300 * 64
    assert step_weight_bytes(config, torch.bfloat16) == 2 * (target + head)
    assert arithmetic_share(config) == pytest.approx((module + head) / (target + head))


def test_engine_benchmark_runs_as_a_file_and_measures_a_fresh_start(tiny_checkpoint):
    model = tiny_checkpoint("llama", max_position_embeddings=1024)
    command = [sys.executable, "benchmarks/bench_engine.py", "--model", str(model), "--device", "cpu", "--quick"]
    command += ["--methods", "plain", "--workloads", "1-open", "--new-tokens", "2", "--no-operators"]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    startup = last_json(process.stdout)["methods"]["plain"]["startup"]
    assert 0 < startup["imported_s"] < startup["loaded_s"] < startup["first_token_s"]
    assert startup["peak_rss_bytes"] > 50 * 2**20


def test_random_drafts_are_made_and_change_no_text(tiny_checkpoint):
    model = tiny_checkpoint("llama", max_position_embeddings=1024)
    options = ["--model", str(model), "--device", "cpu", "--no-startup", "--no-operators", "--workloads", "1-open"]
    options += ["--new-tokens", "24", "--repeats", "1", "--methods", "plain", "random:3", "random"]
    result = bench_engine.run(bench_engine.parse_arguments(options))
    always, auto = (result["methods"][method]["workloads"]["1-open"] for method in ("random:3", "random"))
    assert always["num_equal_to_baseline"] == auto["num_equal_to_baseline"] == 4
    assert len(always["acceptance_by_position"]) == 3
    assert max(always["acceptance_by_position"]) < 0.2
    assert always["num_drafted"] > 200


def test_first_layers_make_a_checkpoint_that_drafts(tiny_checkpoint, tmp_path):
    model, out = tiny_checkpoint("llama_tied", num_hidden_layers=3), tmp_path / "first"
    keep_first_layers(model, 1, out)
    config, whole = read_model_config(out), load_model(model, torch.float32, torch.device("cpu"), progress=False)
    assert config.num_hidden_layers == 1
    short = load_model(out, torch.float32, torch.device("cpu"), progress=False)
    kept, all_weights = dict(short.named_parameters()), dict(whole.named_parameters())
    assert 0 < len(kept) < len(all_weights)
    assert all(torch.equal(weight, all_weights[name]) for name, weight in kept.items())
    with pytest.raises(ValueError, match="num_layers is 4, and the model has 3"):
        keep_first_layers(model, 4, out)


FAKE_RUNNER = """
import sys
sys.path.insert(0, {folder!r})
from protocol import serve

def load(options):
    print("chatter that is no answer")
    if options.method == "broken":
        raise SystemExit("the peer's last words")
    def generate(prompts, num_new_tokens):
        return [[prompt[-1]] * (num_new_tokens - (options.method == "short")) for prompt in prompts]
    return f"fake 1, {{options.num_threads}} threads, {{options.model}}", generate

serve(load, ("plain", "broken", "short"))
"""


@pytest.fixture
def fake_peer(tiny_checkpoint, tmp_path, monkeypatch):
    """Arguments that compare with a peer which repeats the last token of each prompt."""
    (tmp_path / "vllm_runner.py").write_text(FAKE_RUNNER.format(folder=str(REPOSITORY / "benchmarks" / "peers")))
    monkeypatch.setattr(compare, "RUNNERS", tmp_path)
    model = str(tiny_checkpoint("llama", max_position_embeddings=1024))
    arguments = ["--peer", "vllm", "--python", sys.executable, "--model", model, "--dtype", "float32"]
    return [*arguments, "--new-tokens", "5", "--num-threads", "1", "--workloads", "1-open", "8-copy"]


def test_comparison_runs_ours_and_a_peer_in_turn(fake_peer, capsys):
    before = set(process_tree(os.getpid()))
    arguments = [*fake_peer, "--methods", "plain", "suffix_memory", "--repeats", "2", "--recurring"]
    result = compare.run(compare.parse_arguments(arguments))
    compare.print_json(result, None)
    captured = capsys.readouterr()
    printed = last_json(captured.out)
    assert set(process_tree(os.getpid())) <= before, "the peer has ended"
    assert list(printed["sides"]) == ["plain", "suffix_memory", "vllm"]
    assert printed["peer"]["version"].startswith("fake 1, 1 threads, /")
    assert printed["machine"]["commit"] in captured.out
    assert printed["date"] in captured.out
    for cells in printed["sides"].values():
        assert list(cells) == ["1-open", "8-copy", "first token"]
        assert len(cells["1-open"]["tokens_per_s_rounds"]) == 2, "the first of three rounds is not counted"
        assert len(cells["first token"]["ms_rounds"]) == 2 * compare.NUM_FIRST_TOKENS
    assert printed["sides"]["vllm"]["8-copy"]["ratio"] == 1.0
    rounds = [printed["sides"][side]["8-copy"]["tokens_per_s_rounds"] for side in ("plain", "vllm")]
    assert printed["sides"]["plain"]["8-copy"]["ratio"] == pytest.approx(paired_ratio(*rounds))
    progress = [line.split()[3] for line in captured.err.splitlines() if line.startswith("round 1: 1-open")]
    assert progress == ["plain:", "suffix_memory:", "vllm:"]


@pytest.mark.parametrize(
    ("method", "message"),
    [("broken", "the peer's last words"), ("short", r"asked for 8 tokens a prompt and gave \[7\]")],
)
def test_comparison_says_what_is_wrong_with_the_peer(fake_peer, method, message):
    before = set(process_tree(os.getpid()))
    with pytest.raises(RuntimeError, match=message):
        compare.run(compare.parse_arguments([*fake_peer, "--peer-method", method]))
    assert set(process_tree(os.getpid())) <= before


def test_every_peer_has_a_runner():
    assert PEERS == ("llamacpp", "openvino", "transformers", "vllm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "plain", "draft_model"], "say which model drafts with --draft-model"),
        (["--workloads", "3-open"], "choose from 1-open"),
        (["--methods", "telepathy"], "telepathy"),
    ],
)
def test_engine_benchmark_says_what_is_wrong(tiny_checkpoint, arguments, message):
    options = bench_engine.parse_arguments(["--model", str(tiny_checkpoint("llama")), "--no-startup", *arguments])
    with pytest.raises(ValueError, match=message):
        bench_engine.run(options)


def test_absent_demonstration_model_is_pointed_to_make(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_methods, "DEFAULT_MODEL", tmp_path / "model")
    options = bench_engine.parse_arguments(["--quick", "--model", str(tmp_path / "model")])
    with pytest.raises(ValueError, match="run `make model`"):
        bench_engine.run(options)


@pytest.fixture
def scripted_server() -> Iterator[tuple[str, list[dict]]]:
    """A server that answers each completion in three chunks, and what it was asked."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send("application/json", json.dumps({"data": [{"id": "scripted"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            events = [{"choices": [{"text": text}]} for text in ("a", "b", "")]
            metrics = {"drafted": 2, "accepted": 1, "steps": 3}
            metrics |= {"drafted_per_position": [1, 1], "accepted_per_position": [1, 0]}
            events.append({"choices": [], "usage": {"completion_tokens": 4}, "speculation_metrics": metrics})
            lines = [json.dumps(event) for event in events] + ["[DONE]"]
            self._send("text/event-stream", "".join(f"data: {line}\n\n" for line in lines))

        def _send(self, content_type: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def test_serve_benchmark_alternates_drafts_and_none_on_prompts_of_their_own(scripted_server, capsys):
    url, bodies = scripted_server
    result = bench_serve.run(bench_serve.parse_arguments(["--url", url, "--quick", "--pid", str(os.getpid())]))
    bench_serve.print_json(result, None)
    printed = last_json(capsys.readouterr().out)
    assert printed["model"] == "scripted"
    assert list(printed["workloads"]) == ["1-open", "8-copy"]
    for modes in printed["workloads"].values():
        assert list(modes) == ["plain", "drafts"]
        for figures in modes.values():
            assert figures["mean_acceptance_length"] == pytest.approx((1 + 3) / 3)
            assert figures["acceptance_by_position"] == [1.0, 0.0]
            assert figures["tokens_per_s"] > 0
    assert printed["memory"][str(os.getpid())]["num_processes"] >= 1
    without_drafts = [body for body in bodies if body.get("speculative") == {"num_speculative_tokens": 0}]
    assert len(without_drafts) == 4 + 8
    assert len({tuple(body["prompt"][:1]) for body in bodies}) == len(bodies)  # no prefix is shared
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)


def test_serve_benchmark_says_where_it_found_no_server():
    with pytest.raises(ValueError, match="start one with `make serve`"):
        bench_serve.run(bench_serve.parse_arguments(["--url", "http://127.0.0.1:9", "--quick"]))


@pytest.mark.cluster
def test_what_serve_itself_takes_is_measured_beside_the_engine(tiny_checkpoint):
    folder = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))  # short: Ray makes sockets below it
    arguments = ["--model", str(tiny_checkpoint(max_position_embeddings=1024)), "--streams", "4", "--rounds", "1"]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve_floor", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 0, process.stderr
    result = last_json(process.stdout)
    [rates] = result["rounds"]
    assert list(rates) == ["alone", "beside an idle Serve", "beside streams of Serve"]
    assert all(rate > 0 for rate in rates.values())
    assert len(result["first_chunk_ms"]) == 40
    assert min(result["first_chunk_ms"]) > 0
