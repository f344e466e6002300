"""The model and the functions of train.py that need no launcher."""

import argparse
import contextlib
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY

import train
from train import SimpleTransformerBlock, SimpleTransformerModel

SIZES = {"vocab_size": 101, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SimpleTransformerModel(**SIZES)


@pytest.fixture
def input_ids():
    return torch.randint(101, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small_chunks(monkeypatch):
    """Make the loss work through several slices of the vocabulary, the last of them shorter."""
    monkeypatch.setattr(train, "LOGITS_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(train, "MIN_VOCAB_CHUNK", 30)


def plain_loss(model, input_ids, labels):
    """The model's equations written plainly: attention with its matrix, all logits, PyTorch's own layers."""
    x = model.token_embedding(input_ids) + model.position_embedding(torch.arange(input_ids.shape[1]))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=x.dtype)
    for layer in model.layers:
        attention = torch.nn.MultiheadAttention.forward(layer.attention, x, x, x, attn_mask=mask)[0]
        x = layer.norm1(x + attention)
        x = layer.norm2(x + layer.contract(F.gelu(layer.expand(x))))
    logits = F.linear(x, model.output_projection.weight, model.output_projection.bias).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# Contract


def test_parameter_counts_are_the_published_ones():
    with torch.device("meta"):
        assert train.count_parameters(SimpleTransformerModel()) == (254_128_976, 254_128_976)
        large = SimpleTransformerModel(hidden_dim=4096, num_layers=32, num_heads=32)
    large.position_embedding.weight.requires_grad = False
    assert train.count_parameters(large) == (6_855_902_032, 6_855_902_032 - 512 * 4096)


def test_signatures_are_the_documented_ones():
    assert str(inspect.signature(SimpleTransformerBlock)) == "(hidden_dim, num_heads=8, ff_dim=None)"
    expected = "(vocab_size=50000, hidden_dim=1024, num_layers=12, num_heads=16, max_seq_len=512)"
    assert str(inspect.signature(SimpleTransformerModel)) == expected
    data = list(inspect.signature(train.load_wikitext_data).parameters)
    assert data[:5] == ["tokenizer_name", "seq_length", "batch_size", "world_size", "rank"]
    for function in (train.get_args, train.get_memory_stats, train.main):
        assert not inspect.signature(function).parameters
    assert isinstance(SimpleTransformerBlock(32).attention, torch.nn.MultiheadAttention)
    assert SimpleTransformerBlock(32, ff_dim=7).expand.out_features == 7


def test_defaults_are_the_documented_ones(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json"])
    args = vars(train.get_args())
    expected = dict(hidden_dim=1024, num_layers=12, num_heads=16, vocab_size=50000, batch_size=4, seq_length=512)
    expected |= dict(num_steps=20, activation_checkpointing=False, use_real_data=False, loss_log_file=None)
    expected |= dict(warmup_steps=5, log_interval=5, seed=42, learning_rate=None, deepspeed_config="c.json")
    assert expected.items() <= args.items()


def test_memory_is_formatted_in_units_of_1024():
    assert train.format_memory(4 * 1024**3) == "4.00 GB"


def test_memory_stats_on_a_gpu_are_what_pytorch_itself_says_in_one_query(monkeypatch):
    sizes = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 7, "allocated_bytes.all.peak": 5}
    queries = []
    monkeypatch.setattr(train, "get_accelerator", lambda: argparse.Namespace(device_name=lambda: "cuda"))
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "memory_stats", lambda device=None: queries.append(device) or sizes)
    memory = train.get_memory_stats()
    assert len(queries) == 1 and memory == {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }


def test_memory_stats_are_integer_bytes_and_the_peak_remembers_what_was_freed():
    before = train.get_memory_stats()
    assert set(before) == {"allocated", "reserved", "peak"}
    assert all(isinstance(value, int) and value > 0 for value in before.values())
    tensor = torch.ones(200 * 2**20, dtype=torch.uint8)
    held = train.get_memory_stats()
    assert held["allocated"] > before["allocated"] + 150 * 2**20
    del tensor
    assert train.get_memory_stats()["peak"] > held["allocated"] - 2**20  # the kernel's counters are that exact


# Results


def test_logits_have_the_documented_shape_and_are_causal(model, input_ids):
    logits = model(input_ids)
    assert logits.shape == (3, 16, 101)
    changed = input_ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 101
    assert torch.equal(model(changed)[:, :9], logits[:, :9])
    assert not torch.equal(model(changed)[:, 9:], logits[:, 9:])


def test_the_loss_and_all_gradients_equal_a_plain_implementation(model, input_ids, small_chunks):
    labels = input_ids.clone()
    labels[0, 3:9] = -100
    loss = model(input_ids, labels)
    assert loss.dtype == torch.float32 and loss.shape == ()
    plain = plain_loss(model, input_ids, labels)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    ours, plains = gradients(model, loss), gradients(model, plain)
    for name in ours:
        torch.testing.assert_close(ours[name], plains[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_labels_that_are_all_ignored_give_no_gradient(model, input_ids):
    loss = model(input_ids, torch.full_like(input_ids, -100))
    assert loss.isnan() and all((gradient == 0).all() for gradient in gradients(model, loss).values())


def test_the_loss_scales_its_gradient(model, input_ids):
    once, thrice = gradients(model, model(input_ids, input_ids)), gradients(model, 3 * model(input_ids, input_ids))
    torch.testing.assert_close(thrice["layers.0.expand.weight"], 3 * once["layers.0.expand.weight"])


def test_the_loss_is_the_mean_of_the_next_tokens_of_the_logits(model, input_ids):
    log_probabilities = model(input_ids).log_softmax(-1)[:, :-1]
    expected = -log_probabilities.gather(-1, input_ids[:, 1:, None]).mean()
    torch.testing.assert_close(model(input_ids, input_ids), expected, rtol=1e-6, atol=0)


def test_bf16_loss_matches_the_plain_bf16_loss(model, input_ids, small_chunks):
    model.bfloat16()
    ours, plain = model(input_ids, input_ids), plain_loss(model, input_ids, input_ids)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=5e-3, atol=0)


def test_autocast_dtype_reaches_forward_loss_and_backward(model, input_ids):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(input_ids).dtype == torch.bfloat16
        loss, plain = model(input_ids, input_ids), plain_loss(model, input_ids, input_ids)
    torch.testing.assert_close(loss, plain, rtol=5e-3, atol=0)
    ours, plains = gradients(model, loss), gradients(model, plain)
    for name in ours:
        assert ours[name].dtype == torch.float32
        error = (ours[name] - plains[name]).norm() / plains[name].norm()
        assert error < 0.05 or plains[name].norm() < 1e-3, f"{name}: {error}"


def test_activation_checkpointing_changes_no_bit_of_the_results(model, input_ids):
    loss = model(input_ids, input_ids)
    without = gradients(model, loss)
    model.enable_activation_checkpointing()
    again = model(input_ids, input_ids)
    assert torch.equal(loss, again)
    with_it = gradients(model, again)
    assert all(torch.equal(without[name], with_it[name]) for name in without)


def test_activation_checkpointing_keeps_fewer_activations(model, input_ids):
    def saved_elements():
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids, input_ids)
        del loss
        return sum(storages.values())

    without = saved_elements()
    model.enable_activation_checkpointing()
    assert saved_elements() < 0.7 * without


# Refusals


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_1_are_refused(name, size):
    with pytest.raises(ValueError, match=name):
        SimpleTransformerModel(**{**SIZES, name: size})


def test_heads_that_do_not_divide_hidden_are_refused():
    with pytest.raises(ValueError, match="num_heads 5 does not divide hidden_dim 32"):
        SimpleTransformerBlock(32, num_heads=5)


def test_a_sequence_longer_than_the_model_is_refused(model):
    with pytest.raises(ValueError, match="17 tokens is longer than max_seq_len 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    "options",
    [
        ["--hidden_dim", "0"],
        ["--num_steps", "1.5"],
        ["--hidden_dim", "64", "--num_heads", "5"],
        ["--seq_length", "1"],
        ["--learning_rate", "nan"],
        ["--learning_rate", "-1"],
        ["--warmup_steps", "-1"],
        ["--no_such_option"],
        ["--dataset", "text.txt"],
        ["--use_real_data", "--dataset", "no/such.txt"],
        ["--use_real_data", "--tokenizer", "./no_such_folder"],
        ["--eval_steps", "5"],
        ["--seed", "18446744073709551616"],
    ],
)
def test_a_bad_option_is_one_line_on_stderr(options, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json", *options])
    with pytest.raises(SystemExit) as stop:
        train.get_args()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("train.py: error: "), error


class FakeAccelerator:
    """A machine with one GPU that is too old for BF16."""

    def device_name(self):
        return "cuda"

    def device_count(self):
        return 1

    def is_bf16_supported(self):
        return False


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", "an unknown size"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "an unknown size"),
        ("CUDA error: out of memory", "an unknown size"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_memory_that_runs_out_is_known_by_each_of_its_messages(text, asked):
    assert train.out_of_memory(RuntimeError(text)) == asked


@pytest.mark.parametrize(
    ("accelerator", "config", "options", "local_rank", "expected"),
    [
        (FakeAccelerator(), "baseline", [], "1", "process 1 of this node has no GPU: there are 1; lower --num_gpus"),
        (FakeAccelerator(), "bf16_full", [], "0", "this GPU has no BF16"),
        (None, "baseline_deepcompile", [], "0", "compile.deepcompile needs a GPU"),
        (None, "baseline", ["--memory_snapshot", "s.pickle"], "0", "--memory_snapshot needs a GPU"),
    ],
)
def test_what_the_device_cannot_do_is_one_line(accelerator, config, options, local_rank, expected, monkeypatch, capsys):
    import deepspeed

    if accelerator:
        monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    path = f"configs/{config}.json"
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", path, *options])
    with pytest.raises(SystemExit) as stop:
        train.check_device(train.get_args(), train.load_deepspeed_config(path))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and expected in error, error


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"])
@pytest.mark.parametrize("local_rank", ["0", "2", "3"])
def test_of_several_processes_without_a_gpu_only_the_first_says_so(local_rank, variable, monkeypatch, capsys):
    import deepspeed

    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", FakeAccelerator)
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(variable, local_rank)
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "configs/baseline.json"])
    config = {}  # without BF16, which the GPU does not have
    if local_rank == "0":
        train.check_device(train.get_args(), config)
    else:
        with pytest.raises(SystemExit):
            train.check_device(train.get_args(), config)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA T4", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_model_or_none(device, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert train.peak_tflops() == tflops


def test_a_snapshot_is_recorded_from_before_the_model_on(monkeypatch, capsys):
    import deepspeed
    from deepspeed.runtime.zero import stage3

    done = []
    monkeypatch.setattr(deepspeed.zero, "Init", lambda **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: done.append("recording"))
    monkeypatch.setattr(train, "SimpleTransformerModel", lambda *sizes: done.append("model") or 1 / 0)
    for module, name in ((stage3, "defragment"), (stage3, "get_norm_dtype")):  # create_engine changes them
        monkeypatch.setattr(module, name, getattr(module, name))
    for options, order in (([], ["model"]), (["--memory_snapshot", "s.pickle"], ["recording", "model"])):
        monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json", *options])
        with pytest.raises(SystemExit):
            train.create_engine(train.get_args(), {})
        assert done == order
        done.clear()


def test_each_rank_has_a_snapshot_of_its_own(monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--deepspeed_config", "configs/baseline.json", "--memory_snapshot", "a/s.p"]
    )
    monkeypatch.setattr(train, "check_device", lambda *_: None)
    monkeypatch.setenv("LOCAL_RANK", "0")  # which main() would leave behind
    monkeypatch.setattr(train, "run", lambda args, *_: args.memory_snapshot)
    paths = []
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        monkeypatch.setattr(train, "start_distributed", lambda args, group=(rank, world_size): group)
        paths.append(train.main())
    assert paths == ["a/s.p", "a/s.rank0.p", "a/s.rank1.p"]


def test_memory_that_runs_out_still_leaves_the_snapshot(monkeypatch, capsys):
    written = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--deepspeed_config", "configs/baseline.json", "--memory_snapshot", "s.pickle"]
    )
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
    with pytest.raises(SystemExit) as stop:
        train.end_out_of_memory(error, train.get_args(), {"phase": "backward", "step": 3})
    output = capsys.readouterr()
    assert stop.value.code == 1 and written == ["s.pickle"]
    assert output.err.count("\n") == 1 and "out of memory in the backward of step 3: 1.50 GiB more" in output.err
    failed = "FAILED: config=configs/baseline.json reason=OOM phase=backward step=3 asked=1.50_GiB "
    assert output.out.startswith(failed) and " reserved_mem_bytes=" in output.out and "are reserved" in output.err


# The DeepSpeed configuration


def complete(config, monkeypatch, *options, world_size=1):
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json", *TINY, *options])
    return train.complete_config(config, train.get_args(), world_size)


def test_what_deepspeed_believes_is_what_is_fed(monkeypatch):
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3, "optimizer": {"type": "Adam"}}
    completed, notices = complete(config, monkeypatch, world_size=2)
    assert completed["train_micro_batch_size_per_gpu"] == 2
    assert completed["train_batch_size"] == 2 * 3 * 2
    assert len(notices) == 1 and "train_micro_batch_size_per_gpu" in notices[0] and "8" in notices[0]
    assert config["train_micro_batch_size_per_gpu"] == 8


def test_a_global_batch_alone_gives_the_accumulation(monkeypatch):
    completed, notices = complete({"train_batch_size": 16, "optimizer": {"type": "Adam"}}, monkeypatch, world_size=2)
    assert completed["gradient_accumulation_steps"] == 4 and not notices


def test_the_learning_rate_is_the_jsons_unless_given(monkeypatch):
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    assert complete(config, monkeypatch)[0]["optimizer"]["params"]["lr"] == 3e-4
    assert complete(config, monkeypatch, "--learning_rate", "1e-5")[0]["optimizer"]["params"]["lr"] == 1e-5


def test_a_given_learning_rate_is_not_undone_by_the_scheduler(monkeypatch):
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-6}}}
    completed, notices = complete(config, monkeypatch, "--learning_rate", "1e-3")
    assert completed["scheduler"]["params"]["warmup_max_lr"] == 1e-3 and "warmup_max_lr" in notices[0]


def test_comments_in_the_configuration_are_read_as_deepspeed_does(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{\n  // a comment\n  "bf16": {"enabled": true}, # another\n}\n')
    assert train.load_deepspeed_config(config) == {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"bf16": {"enabled": true}, "optimizer": {"type"', "line 1"),
        ("[1, 2]", "expected a JSON object"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "the same key"),
        ('{"optimizer": "AdamW"}', "optimizer is 'AdamW'"),
        ('{"optimizer": {}}', 'no "type"'),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}', "lr is '1e-4'"),
        ('{"gradient_accumulation_steps": 2.0}', "gradient_accumulation_steps is 2.0"),
        ('{"zero_optimization": true}', "zero_optimization is True"),
        ('{"optimizer": {"type": "Lion", "params": {"bf16_stochastic_round": true}}}', "change optimizer.type"),
        ('{"zero_optimization": {"stage": "3"}}', "expected 0, 1, 2 or 3"),
        ('{"zero_optimization": {"reduce_bucket_size": "5e8"}}', "reduce_bucket_size is '5e8'"),
        ('{"zero_optimization": {"sub_group_size": NaN}}', "NaN"),
        ('{"zero_optimization": {"stage3_param_persistence_threshold": "1e5"}}', "persistence_threshold is '1e5'"),
        ('{"zero_optimization": {"offload_optimizer": true}}', 'with "device": "cpu"'),
        ('{"zero_optimization": {"offload_param": "none"}}', 'with "device": "cpu"'),
        ('{"bf16": {"enabled": "false"}}', "bf16.enabled is 'false'"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}', 'with "device": "cpu"'),
        ('{"optimizer": {"type": "AdamW8bit"}}', "bf16_master_weights_and_grads"),
        (
            '{"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}',
            "betas is [0.9]; expected a list of two numbers",
        ),
        ('{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}}', "betas is [0.9, 1]"),
        (
            '{"optimizer": {"type": "AdamW", "params": {"eps": -1}}}',
            "eps is -1; expected a finite number of at least 0",
        ),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": 1' + 400 * "0" + "}}}", "lr is 1000"),
        (
            '{"bf16": {"bf16_optimizer_states": "false"}}',
            "bf16.bf16_optimizer_states is 'false'; expected true or false",
        ),
        ('{"bf16": {"bf16_master_weights_and_grads": "auto"}}', "bf16_master_weights_and_grads is 'auto'"),
        ('{"bf16": {"bf16_stochastic_round": true}}', "bf16.bf16_stochastic_round is unknown"),
        ('{"gradient_clipping": "x"}', "gradient_clipping is 'x'"),
        ('{"bf16": {"bf16_optimizer_state": true}}', "bf16_optimizer_state is unknown"),
        ('{"optimizer": {"type": "AdamW", "params": {"bf16_stochastic_rounding": true}}}', "rounding is unknown"),
        ('{"bf16": {"bf16_optimizer_states": true}}', "requires bf16_master_weights_and_grads"),
        ('{"bf16": {"bf16_master_weights_and_grads": true}}', "requires ZeRO"),
        (
            '{"bf16": {"bf16_master_weights_and_grads": true}, "zero_optimization": {"stage": 3}}',
            "requires bf16_optimizer_states too, or offload_optimizer",
        ),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line_that_names_it(content, expected, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SystemExit) as stop:
        train.load_deepspeed_config(tmp_path / "config.json")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and expected in error and "config.json" in error


@pytest.mark.parametrize(
    "content",
    [
        '{"gradient_clipping": false}',  # how one turns it off
        '{"optimizer": {"type": "AdamW", "params": {"weight_decay": -0.01, "betas": ["auto", 0.95]}}}',
        '{"optimizer": {"type": "Lion", "params": {"betas": [0.9, 1.0]}}}',
        '{"bf16": {"bf16_master_weights_and_grads": true}, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
        '{"zero_optimization": {"stage": 3, "sub_group_size": 1e9, "offload_optimizer": {"device": "none"}}}',
        '{"my_own_key": {"enabled": "maybe"}}',
    ],
)
def test_what_deepspeed_takes_is_not_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert train.load_deepspeed_config(tmp_path / "config.json")


def test_a_scheduler_needs_no_parameters(monkeypatch):
    """DeepSpeed would call it with None."""
    assert complete({"scheduler": {"type": "WarmupLR"}}, monkeypatch)[0]["scheduler"]["params"] == {}


def test_without_torchao_its_configurations_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train.load_deepspeed_config("configs/bf16_full_sr.json")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install torchao" in error
    train.load_deepspeed_config("configs/bf16_full.json")


def test_auto_is_filled_in_as_hugging_face_does(monkeypatch):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", "auto"], "eps": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    completed, notices = complete(config, monkeypatch, "--learning_rate", "2e-4")
    assert '"auto"' not in str(completed).replace("'", '"') and not notices
    assert completed["scheduler"]["params"] == {"warmup_max_lr": 2e-4, "total_num_steps": 6}
    assert completed["zero_optimization"]["reduce_bucket_size"] == 64 * 64


def test_auto_where_nobody_knows_a_value_is_refused_by_name(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        complete({"steps_per_print": "auto"}, monkeypatch)
    assert "steps_per_print" in capsys.readouterr().err


def test_published_configurations_differ_only_in_what_is_compared():
    names = ("baseline", "bf16_master_wg", "bf16_full", "baseline_offload")
    configs = {name: train.load_deepspeed_config(f"configs/{name}.json") for name in names}
    for config in configs.values():
        assert config["zero_optimization"]["stage"] == 3 and config["optimizer"]["type"] == "AdamW"
    wg, full = configs["bf16_master_wg"], configs["bf16_full"]
    assert wg["bf16"].pop("bf16_master_weights_and_grads") and full["bf16"].pop("bf16_master_weights_and_grads")
    assert full["bf16"].pop("bf16_optimizer_states")
    assert wg == configs["baseline_offload"]
    assert wg["zero_optimization"].pop("offload_optimizer")["device"] == "cpu"
    assert configs["baseline"] == wg == full

    stochastic, bits = (train.load_deepspeed_config(f"configs/bf16_full_{name}.json") for name in ("sr", "sr_8bit"))
    assert bits["optimizer"].pop("type") == "AdamW8bit" and stochastic["optimizer"].pop("type") == "AdamW"
    assert stochastic == bits and stochastic.pop("zero_allow_untested_optimizer")
    assert stochastic["optimizer"]["params"].pop("bf16_stochastic_round")
    assert stochastic["optimizer"]["params"] == full["optimizer"]["params"]
    assert stochastic["zero_optimization"] == full["zero_optimization"]
    deepcompile = train.load_deepspeed_config("configs/baseline_deepcompile.json")
    assert deepcompile.pop("compile") == {"deepcompile": True} and deepcompile == configs["baseline"]


# torchao's optimizer


@pytest.mark.parametrize("elements", [256, 4096 + 256, 50_001])
def test_8_bit_moments_never_fall_back_to_full_size(elements):
    """torchao alone keeps full-size moments below 4,096 elements and where its block of 256 does not divide them."""
    weight = torch.randn(elements).bfloat16().requires_grad_()
    optimizer = train.torchao_adamw([weight], "AdamW8bit", {"lr": 1e-2, "bf16_stochastic_round": True})
    before = weight.detach().clone()
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is weight and optimizer.param_groups[0]["lr"] == 1e-2
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    full_size = sum(moment.numel() for moment in moments if not hasattr(moment, "codes"))
    assert all(part.grad is None for part in optimizer.state), "a view keeps the whole gradient alive"
    assert full_size == 2 * (elements % 256) and sum(moment.numel() for moment in moments) == 2 * elements
    torch.testing.assert_close(weight.detach(), before - 2e-2, rtol=2e-2, atol=2e-3)  # Adam's step is lr for each


def test_8_bit_moments_step_in_pieces_as_they_would_at_once(monkeypatch):
    """The moments are in FP32 while they change, so that a whole embedding at once would take gigabytes."""
    gradients = [torch.randn(5 * 512 + 300).bfloat16() for _ in range(3)]
    weights = []
    for piece in (512, 2**26):
        monkeypatch.setattr(train, "PIECE", piece)
        weight = torch.ones(5 * 512 + 300).bfloat16().requires_grad_()
        optimizer = train.torchao_adamw([weight], "AdamW8bit", {"lr": 1e-2})
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        weights.append(weight.detach())
        assert max(state.numel() for state in optimizer.state) == min(piece, 5 * 512 + 256)
    assert torch.equal(*weights)


def test_a_lock_that_a_killed_compilation_left_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert train.operator_locks() == []
    lock = tmp_path / "py312_cu130" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert train.operator_locks() == [lock]


# The estimate


def estimate(config, monkeypatch, *options, world_size=1):
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json", *options])
    args = train.get_args()
    config, _ = train.complete_config(train.load_deepspeed_config(f"configs/{config}.json"), args, world_size)
    return train.estimate_memory(config, args, world_size)


@pytest.mark.parametrize(
    ("config", "per_parameter"),
    [
        ("baseline", 16),
        ("bf16_full", 10),
        ("bf16_full_sr", 10),
        ("bf16_full_sr_8bit", 8.03),
        ("bf16_master_wg", 2),
        ("baseline_offload", 2),
    ],
)
@pytest.mark.parametrize("world_size", [1, 8])
def test_the_expected_states_are_partitioned_over_the_gpus(config, per_parameter, world_size, monkeypatch):
    device, host = estimate(config, monkeypatch, world_size=world_size)
    states = sum(device.get(part, 0) for part in train.STATE_PARTS)
    whole = 2 * (12 * 13 * 1024 + 50_000) * (world_size > 1)  # biases and norms, which ZeRO-3 does not partition
    assert states - whole == pytest.approx(per_parameter * 254_128_976 / world_size, rel=1e-3)
    on_host = {"bf16_master_wg": 14, "baseline_offload": 18}.get(config, 0)
    assert sum(host.values()) == pytest.approx(on_host * 254_128_976 / world_size, rel=1e-5)


def test_offload_to_none_is_no_offload(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json"])
    args = train.get_args()
    config, _ = train.complete_config(train.load_deepspeed_config("configs/baseline.json"), args, 1)
    expected = train.estimate_memory(config, args, 1)
    config["zero_optimization"] |= {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    assert train.estimate_memory(config, args, 1) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_more_gpus_never_need_more_each_nor_does_checkpointing(stage, offload, checkpointing, monkeypatch):
    zero = {"stage": stage} | ({"offload_optimizer": {"device": offload}} if offload and stage else {})
    options = ["--activation_checkpointing"] if checkpointing else []
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json", *options])
    args = train.get_args()

    def expected_peak(world_size):
        config = {"bf16": {"enabled": True}, "zero_optimization": zero}
        device, _ = train.estimate_memory(train.complete_config(config, args, world_size)[0], args, world_size)
        return train.expected_peak(device)

    peaks = {world_size: expected_peak(world_size) for world_size in (1, 2, 3, 8, 64, 1024)}
    if stage == 3 and offload:  # one GPU has no weights to gather, which is then most of what there is
        del peaks[1]
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    args.activation_checkpointing = True
    assert expected_peak(8) <= peaks[8]


def test_the_step_flattens_what_shares_a_sub_group_and_casts_what_fp32_masters_need(monkeypatch):
    shape = "--hidden_dim 4096 --num_layers 32 --num_heads 32 --activation_checkpointing".split()
    largest = 50_000 * 4096  # a sub-group by itself, as parameters come by size

    def step_bytes(config):
        device, _ = estimate(config, monkeypatch, *shape)
        return [size for term, size in device.items() if term.startswith("step:")]

    assert step_bytes("baseline") == [4 * largest]
    (flat,) = step_bytes("bf16_full")
    assert 2 * 50_000_000 <= flat < 2 * 67_200_000  # the least matrices, until they pass sub_group_size
    assert step_bytes("bf16_full_sr_8bit") == [flat, 8 * train.PIECE]


def test_deepspeeds_older_offload_keys_count_as_offload(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--deepspeed_config", "c.json"])
    args = train.get_args()
    config, _ = train.complete_config(train.load_deepspeed_config("configs/baseline.json"), args, 1)
    estimates = []
    for keys in (
        {"cpu_offload": True, "cpu_offload_param": True},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ):
        changed = config | {"zero_optimization": config["zero_optimization"] | keys}
        estimates.append(train.estimate_memory(changed, args, 1))
    assert estimates[0] == estimates[1] and "weights" in estimates[0][1]


def test_the_estimate_of_a_large_shape_needs_no_gpu_launcher_or_weights(monkeypatch, capsys):
    shape = "--hidden_dim 8192 --num_layers 80 --num_heads 64 --seq_length 4096 --batch_size 1".split()
    options = [
        "--estimate",
        "--deepspeed_config",
        "configs/bf16_full.json",
        "--world_size",
        "64",
        *shape,
        "--activation_checkpointing",
    ]
    monkeypatch.setattr("sys.argv", ["train.py", *options])
    assert train.main() is None
    output = capsys.readouterr().out
    assert "65,285,833,552 parameters on 64 GPU(s)" in output
    fields = dict(field.split("=") for field in output.splitlines()[-1].removeprefix("ESTIMATE: ").split())
    whole = 2 * (80 * 13 * 8192 + 50_000)  # biases and norms, which ZeRO-3 does not partition
    assert int(fields["model_state_bytes"]) - whole == pytest.approx(10 * 65_285_833_552 / 64, rel=1e-4)
    fewest = int(fields["fewest_gpus"])
    assert 1 < fewest < 64 and f"fewest GPUs that hold it: {fewest}\n" in output
    assert output.count(": fits in 80 GiB") == output.count(": does not fit in 80 GiB") == 1  # with checkpointing alone


OLDER_SHAPES = {
    254_128_976: (1024, 12, 16),
    254_751_872: (1024, 12, 16, 50304),
    1_011_630_928: (2048, 16, 16),
    3_089_714_000: (2560, 36, 20),
    6_855_902_032: (4096, 32, 32),
}


PEAK_TOLERANCES = {"small": 0.05, "large": 0.001, "offloaded": 0.005}  # which README names


def published_runs():
    return sorted((ROOT / "results" / "h200").rglob("*.log"))


@pytest.mark.parametrize("log", published_runs(), ids=lambda log: str(log.relative_to(ROOT / "results")))
def test_the_estimate_holds_against_the_published_runs(log, monkeypatch):
    from gather_memory import merge_summaries, summaries_in

    summary = merge_summaries(summaries_in(log))
    if summary is None or "deepcompile" in summary["config"]:
        pytest.skip("a run without a summary, or one that the estimate does not know")
    shape = [part for key in train.SHAPE_KEYS if key in summary for part in (f"--{key}", str(summary[key]))]
    if "hidden_dim" not in summary:  # a log of before the shape was in it
        sizes = zip(train.SHAPE_KEYS, OLDER_SHAPES[summary["params"]], strict=False)
        shape += [part for key, size in sizes for part in (f"--{key}", str(size))]
    shape += ["--activation_checkpointing"] if summary["activation_checkpointing"] else []
    name = summary["config"].split("/")[-1].removesuffix(".json")
    device, _ = estimate(name, monkeypatch, *shape, world_size=summary["world_size"])
    states = sum(device.get(part, 0) for part in train.STATE_PARTS)
    if "model_state_bytes" in summary:
        assert states == pytest.approx(summary["model_state_bytes"], rel=0.01)
    assert states + train.WORKSPACE_BYTES == pytest.approx(summary["alloc_mem_bytes"], rel=0.03)
    offloaded = name in ("bf16_master_wg", "baseline_offload")
    tolerance = PEAK_TOLERANCES["small" if summary["params"] < 6e9 else "offloaded" if offloaded else "large"]
    assert train.expected_peak(device) == pytest.approx(summary["peak_mem_bytes"], rel=tolerance)


# Data


def test_text_is_packed_without_padding_so_that_every_token_counts_once(text_and_tokenizer):
    text, tokenizer = text_and_tokenizer
    loader, vocab_size = train.load_wikitext_data(str(tokenizer), 32, 2, 1, 0, str(text))
    words = (text / "a.txt").read_text().split()
    expected = torch.tensor([int(word.removeprefix("word")) + 1 for word in words])
    packed = {tuple(row.tolist()) for row in expected[: len(expected) // 32 * 32].view(-1, 32)}
    seen = [tuple(row.tolist()) for batch in loader for row in batch]
    assert len(seen) == len(set(seen)) == len(packed) // 2 * 2 and set(seen) <= packed
    assert vocab_size == 128  # 70 entries, padded to a multiple of 64


def test_held_out_text_is_the_last_tenth_and_never_trained_on(text_and_tokenizer):
    text, tokenizer = map(str, text_and_tokenizer)
    loaders = [train.load_wikitext_data(tokenizer, 32, 1, 1, 0, text, part=part)[0] for part in ("train", "held_out")]
    everything, _ = train.load_wikitext_data(tokenizer, 32, 1, 1, 0, text)
    trained, held_out = ([tuple(row.tolist()) for batch in loader for row in batch] for loader in loaders)
    assert not set(trained) & set(held_out) and len(trained) + len(held_out) == len(everything)
    assert len(held_out) == len(everything) // 10 and held_out == [
        tuple(row.tolist()) for row in everything.dataset[len(trained) :]
    ]


def test_ranks_draw_different_sequences_and_epochs_another_order(text_and_tokenizer):
    text, tokenizer = text_and_tokenizer
    loaders = [train.load_wikitext_data(str(tokenizer), 32, 2, 2, rank, str(text / "a.txt"))[0] for rank in (0, 1)]
    first, second = ({tuple(row.tolist()) for batch in loader for row in batch} for loader in loaders)
    assert not first & second
    batches = train.endless(loaders[0])
    epochs = [[next(batches).tolist() for _ in range(len(loaders[0]))] for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_random_tokens_differ_between_ranks_and_repeat_with_the_seed():
    batch = [next(train.random_batches(1000, 8, 2, seed, rank)).tolist() for seed, rank in ((1, 0), (1, 1), (1, 0))]
    assert batch[0] != batch[1] and batch[0] == batch[2]


def test_a_text_too_short_is_refused_with_what_is_needed(text_and_tokenizer):
    text, tokenizer = text_and_tokenizer
    with pytest.raises(ValueError, match="too short"):
        train.load_wikitext_data(str(tokenizer), 512, 8, 2, 0, str(text))


def test_without_network_the_error_names_the_offline_way(text_and_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="--dataset TEXT_FILE_OR_FOLDER --tokenizer FOLDER"):
        train.load_wikitext_data(str(tmp_path / "no_tokenizer"), 32, 2, 1, 0, str(text_and_tokenizer[0]))
    with pytest.raises(ValueError, match=r"no \*.txt"):
        train.load_wikitext_data(str(text_and_tokenizer[1]), 32, 2, 1, 0, str(tmp_path))


def test_the_summary_line_survives_a_path_with_spaces():
    from gather_memory import parse_summary_line

    fields = dict(params=1, peak_mem_bytes=2, alloc_mem_bytes=3, avg_step_time="0.5000", world_size=4)
    line = train.summary_line("my configs/100%\u2003b.json", **fields)
    assert line.startswith("SUMMARY: config=my%20configs/") and line.count(" ") == len(fields) + 1
    assert parse_summary_line(line)["config"] == "my configs/100%\u2003b.json"
    assert math.isclose(parse_summary_line(line)["avg_step_time"], 0.5)


# Memory that can be pinned without a GPU


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the most elements of any tensor that an operator makes, views of what existed before left out."""

    def __init__(self):
        super().__init__()
        self.elements = self.fp64_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if is_tensor(t)
        }
        for tensor in torch.utils._pytree.tree_leaves(result):
            if is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
                if tensor.dtype == torch.float64:
                    self.fp64_elements = max(self.fp64_elements, tensor.numel())
        return result


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def test_a_training_step_holds_no_tensor_of_the_size_of_the_logits():
    model = SimpleTransformerModel(vocab_size=50_000, hidden_dim=64, num_layers=1, num_heads=2, max_seq_len=512)
    input_ids = torch.randint(50_000, (4, 512))
    with LargestTensor() as step:
        model(input_ids, input_ids).backward()
    with torch.no_grad(), LargestTensor() as logits:
        model(input_ids[:1])
    assert logits.elements >= 512 * 50_000  # the recorder does see logits where they exist
    assert step.elements <= train.LOGITS_CHUNK_ELEMENTS < 4 * 512 * 50_000 / 10


def test_a_training_step_holds_no_attention_matrix():
    model = SimpleTransformerModel(vocab_size=100, hidden_dim=32, num_layers=1, num_heads=8, max_seq_len=1024)
    input_ids = torch.randint(100, (2, 1024))
    with LargestTensor() as step:
        model(input_ids, input_ids).backward()
    assert step.elements < 2 * 8 * 1024 * 1024 / 4


# The update ratio


def one_step(weight_dtype, learning_rate, round_stochastically=False):
    """UpdateProbe's sums over the second step of AdamW on 20,000 weights held in `weight_dtype`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20_000, generator=generator).to(weight_dtype).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=learning_rate, weight_decay=0.1)
    probe = train.UpdateProbe(optimizer, seed=0, share=1)
    for _ in range(2):
        weight.grad = torch.randn(20_000, generator=generator).to(weight_dtype)
        probe.before_step()
        before = weight.detach().float()
        optimizer.step()
        if round_stochastically and optimizer.state[weight]["step"] == 2:
            state, (beta1, beta2) = optimizer.state[weight], optimizer.param_groups[0]["betas"]
            moments = state["exp_avg"].float() / (1 - beta1**2), state["exp_avg_sq"].float() / (1 - beta2**2)
            exact = before - learning_rate * (moments[0] / (moments[1].sqrt() + 1e-8) + 0.1 * before)
            bits = exact.view(torch.int32) + torch.randint(2**16, exact.shape, generator=generator, dtype=torch.int32)
            weight.data = (bits & -(2**16)).view(torch.float32).to(weight_dtype)
    return probe.after_step()


def test_the_update_ratio_is_1_for_exact_arithmetic_and_falls_with_bf16_rounding():
    product, square, changed, sampled, *_ = one_step(torch.float32, 1e-4)
    assert product / square == pytest.approx(1, abs=1e-3) and changed > 0.99 * sampled == 19_800
    sums = [one_step(torch.bfloat16, learning_rate) for learning_rate in (1e-2, 1e-4, 1e-5)]
    ratios = [product / square for product, square, *_ in sums]
    assert 1.1 > ratios[0] > 0.9 > ratios[1] > ratios[2]


def test_the_update_ratio_of_stochastic_rounding_is_1_within_sampling_error():
    product, square, changed, sampled, *_ = one_step(torch.bfloat16, 1e-4, round_stochastically=True)
    assert product / square == pytest.approx(1, abs=0.2) and changed < 0.5 * sampled


def test_the_update_ratio_samples_all_tensors_in_proportion_and_the_same_each_time():
    weights = [torch.randn(size, requires_grad=True) for size in (32_000, 8_000)]
    optimizer = torch.optim.AdamW(weights)
    probe = train.UpdateProbe(optimizer, seed=0, share=0.1)
    samples = []
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        probe.before_step()
        samples.append({(len(index), kind): index.tolist() for _, kind, index, _ in probe.parts})
        optimizer.step()
        probe.keep_moments()
        product, square, _, sampled, *_ = probe.after_step()
    assert samples[0] == {} and samples[1] == samples[2]
    assert set(samples[1]) == {(3_200, "intended"), (400, "exact"), (800, "intended"), (100, "exact")}
    assert sampled == 4_000 and product / square == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adam_ratio_is_against_moments_kept_in_fp32_whatever_the_optimizers_are_in(dtype):
    """By hand: 40 steps with changing betas and learning rate, and a weight whose gradient is sometimes missing."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in (3_000, 500)]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.1)
    probe = train.UpdateProbe(optimizer, seed=0, share=8)  # all weights for both ratios
    moments = {weight: torch.zeros(2, len(weight), dtype=torch.float64) for weight in weights}
    for step in range(40):
        group = optimizer.param_groups[0]
        group["lr"], group["betas"] = lr, (beta1, beta2) = 1e-3 * (step % 3 + 1), (0.9, 0.9 + 0.01 * (step % 5))
        for weight in weights:
            weight.grad = torch.randn(len(weight), generator=generator).to(dtype)
        if step % 4 == 1:
            weights[1].grad = None
        probe.before_step()
        before = [weight.detach().double() for weight in weights]
        optimizer.step()
        group["lr"], group["betas"] = 1.0, (0.1, 0.1)  # what a scheduler does after the step is for the next one
        product = square = 0
        for weight, old in zip(weights, before, strict=True):
            exp_avg, exp_avg_sq = moments[weight]
            if weight.grad is not None:
                exp_avg.lerp_(weight.grad.double(), 1 - beta1)
                exp_avg_sq.lerp_(weight.grad.double() ** 2, 1 - beta2)
            weight.grad = None
            denominator = (exp_avg_sq / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
            exact = -lr * (exp_avg / (1 - beta1 ** (step + 1)) / denominator + 0.1 * old)
            product += ((weight.detach().double() - old) * exact).sum()
            square += (exact * exact).sum()
        probe.keep_moments()
        probe.keep_moments()  # nothing twice
        *_, exact_product, exact_square = probe.after_step()
        if step > 0:  # before the first step it does not know the weights
            assert exact_square == pytest.approx(square.item(), rel=1e-3)
            assert exact_product == pytest.approx(product.item(), rel=1e-3)


def test_the_adam_ratio_shows_what_moments_lose_and_the_update_ratio_does_not():
    """Before the last step the second moments lose three quarters; the step divides by their root."""
    weight = torch.randn(5_000, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.95))
    probe = train.UpdateProbe(optimizer, seed=0, share=8)
    for step in range(60):
        weight.grad = torch.randn_like(weight)
        if step == 59:
            optimizer.state[weight]["exp_avg_sq"] /= 4
            probe.before_step()
        optimizer.step()
        probe.keep_moments()
    product, square, _, _, exact_product, exact_square = probe.after_step()
    assert product / square == pytest.approx(1, abs=1e-3)
    assert exact_product / exact_square == pytest.approx(1.9, abs=0.15)


def test_a_weight_whose_memory_is_on_a_disk_has_no_ratio():
    weight = torch.randn(100, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    probe = train.UpdateProbe(optimizer, seed=0, share=1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    weight.data = torch.empty(0)
    probe.before_step()
    assert probe.after_step() == [0] * 6


def test_the_tail_is_the_last_tenth_of_the_steps_or_the_last_value_before_it():
    values = [(step, float(step)) for step in range(0, 30, 4)]
    assert train.tail_mean(values, 30) == 28 and train.tail_mean(values[:7], 25) == 24  # from steps 27 and 22 on
    assert train.tail_mean(values[:3], 30) == 8


def test_the_update_ratio_is_for_adamw_alone():
    weight = torch.zeros(3, requires_grad=True)
    assert train.UpdateProbe(torch.optim.AdamW([weight]), 0, 10).supported
    assert train.UpdateProbe(train.torchao_adamw([weight], "AdamW8bit", {"lr": 1e-4}), 0, 10).supported
    assert not train.UpdateProbe(torch.optim.SGD([weight]), 0, 10).supported
