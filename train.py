#!/usr/bin/env python3
"""Train a small transformer under DeepSpeed and measure what a configuration costs in memory and time.

One GPU, or the CPU where there is none:
    deepspeed --num_gpus=1 train.py --deepspeed_config configs/baseline.json
    deepspeed --num_gpus=1 train.py --deepspeed_config configs/bf16_full.json --activation_checkpointing
Two GPUs, real text:
    deepspeed --num_gpus=2 train.py --deepspeed_config configs/bf16_full.json --use_real_data

The last line, `SUMMARY: ...`, is what gather_memory.py reads.
"""

import argparse
import copy
import ctypes
import functools
import gc
import importlib.util
import json
import math
import os
import platform
import re
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from urllib.parse import quote

import hjson
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_DATASET_CONFIG = "wikitext-103-raw-v1"
DEFAULT_DATASET_SPLIT = "train[:1%]"  # about a million tokens: hundreds of default steps
DEFAULT_TOKENIZER = "gpt2"
DEFAULT_LEARNING_RATE = 1e-4
IGNORE_INDEX = -100  # the Hugging Face label that carries no loss

# Logits exist for one slice of the vocabulary at a time, of about this many elements (32 MiB in fp32).
LOGITS_CHUNK_ELEMENTS = 8 * 2**20
MIN_VOCAB_CHUNK = 1024

EVAL_BATCHES = 50  # at most, on each rank
MEMORY_LOG_COLUMNS = ("step", "loss", "step_time_s", "allocated_bytes", "reserved_bytes", "peak_bytes")
DEFAULT_GPU_MEMORY_GIB = 80
MOST_GPUS = 1024  # that the estimate looks at
MOST_LAYERS = 2000
CUDA_CONTEXT_BYTES = 2**30  # what the estimate leaves free for the CUDA context and NCCL
RESERVED_SHARE = 1.1  # of the peak: the published runs from 3B on one GPU reserved up to 1.5 % more, with offload 6 %
WORKSPACE_BYTES = 64 * 2**20  # cuBLAS on Hopper and newer: two streams of 32 MiB

ELEMENT_KEYS = {  # of zero_optimization, with the least that makes sense
    "sub_group_size": 1,
    "reduce_bucket_size": 1,
    "stage3_max_live_parameters": 1,
    "stage3_param_persistence_threshold": 0,
}
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
BF16_SWITCHES = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

DEEPCOMPILE_WARMUP_STEPS = 10  # DeepCompile compiles in step 0 and, with what it has then profiled, in step 5
SHAPE_KEYS = ("hidden_dim", "num_layers", "num_heads", "vocab_size", "batch_size", "seq_length")
STATE_PARTS = ("weights", "gradients", "master_weights", "moments")
BLOCK = 256  # elements of an 8-bit moment that share one fp32 scale, as in torchao
PIECE = 2**26  # elements stepped at once with 8-bit moments, which are in fp32 while they change
UPDATE_SAMPLES = 2**20  # of the model's master weights, on which the update ratio is measured
EXACT_PART = 1 / 8  # of as many, whose moments are kept in fp32, for the adam ratio

# Dense BF16 peak in TFLOP/s, from the vendors' data sheets, by a part of the device's name; the first found counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "GB200": 2500,
    "H100": 989,
    "H200": 989,
    "A100": 312,
    "B200": 2250,
    "L40S": 362,
    "MI300X": 1307,
}


def local_rank():
    """This process's number on its node, as the launcher or MPI gives it; 0 without either."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)


def fail(message, status=2, every_rank=False):
    """End the program with one line on stderr, of local rank 0 alone or of this rank whichever it is (every_rank).

    Status 2 is a user's mistake.
    """
    if every_rank or local_rank() == 0:
        print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # the launcher kills all ranks when one ends: let local rank 0 say why first
    sys.exit(status)


def get_accelerator():
    """DeepSpeed's accelerator; imported late, because that takes seconds which --help and --estimate do without."""
    import deepspeed

    return deepspeed.accelerator.get_accelerator()


# ---------------------------------------------------------------------------------------------------
# Arguments and the DeepSpeed configuration
# ---------------------------------------------------------------------------------------------------


def at_least(minimum, maximum=2**31 - 1):
    """An argparse type: a whole number from `minimum` to `maximum`."""

    def integer(text):
        if not re.fullmatch(r"[+-]?[0-9]{1,10}", text) or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} to {maximum}")
        return int(text)

    return integer


def positive(text):
    """An argparse type: a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def get_args():
    """Parse and check the command line; a mistake ends the program with one line on stderr."""
    parser = argparse.ArgumentParser(
        description="Train a transformer under DeepSpeed and measure peak memory, allocated memory and step time.",
        epilog="Start it with the launcher: deepspeed --num_gpus=N train.py --deepspeed_config configs/baseline.json",
    )
    parser.error = lambda message: fail(f"{message} (see train.py --help)")  # one line, not the whole usage
    add = parser.add_argument_group("DeepSpeed").add_argument
    add("--deepspeed_config", required=True, metavar="JSON", help="DeepSpeed configuration file")
    add("--local_rank", type=int, default=-1, metavar="N", help="set by the launcher")
    add = parser.add_argument_group("model").add_argument
    add("--hidden_dim", type=at_least(1), default=1024, metavar="N", help="hidden dimension")
    add("--num_layers", type=at_least(1, MOST_LAYERS), default=12, metavar="N", help="transformer blocks")
    add("--num_heads", type=at_least(1), default=16, metavar="N", help="attention heads")
    add("--vocab_size", type=at_least(2), default=50000, metavar="N", help="random tokens' vocabulary")
    add("--activation_checkpointing", action="store_true", help="recompute each block in the backward")
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=at_least(1), default=4, metavar="N", help="micro batch on each GPU")
    add("--seq_length", type=at_least(2), default=512, metavar="N", help="tokens in a sequence")
    add("--num_steps", type=at_least(1), default=20, metavar="N", help="optimizer steps")
    add("--learning_rate", type=positive, metavar="X", help="the optimizer's lr instead of the JSON's")
    add("--seed", type=at_least(0), default=42, metavar="N", help="seed of weights and data")
    add = parser.add_argument_group("data (the others need --use_real_data)").add_argument
    add("--use_real_data", action="store_true", help="train on text instead of random tokens")
    source = "a text file, a folder of *.txt files, or 1 %% of the train split of Hub NAME or NAME:CONFIG"
    add("--dataset", metavar="SOURCE", help=f"{source} (default: {DEFAULT_DATASET}:{DEFAULT_DATASET_CONFIG})")
    add("--tokenizer", metavar="SOURCE", help=f"Hub NAME, or a local folder (default: {DEFAULT_TOKENIZER})")
    add("--eval_steps", type=at_least(1), metavar="N", help="every N steps, loss on the text's last tenth, held out")
    add = parser.add_argument_group("measurement and logs").add_argument
    add("--warmup_steps", type=at_least(0), default=5, metavar="N", help="leading steps not timed (DeepCompile: >= 10)")
    add("--log_interval", type=at_least(1), default=5, metavar="N", help="print every N-th step")
    add("--loss_log_file", metavar="CSV", help="write step,loss to this file as the run goes")
    add("--memory_log_file", metavar="CSV", help=f"the same with {', '.join(MEMORY_LOG_COLUMNS)}")
    add("--memory_snapshot", metavar="PICKLE", help="record of allocations, for pytorch.org/memory_viz; one a rank")
    add = parser.add_argument_group("estimate").add_argument
    add("--estimate", action="store_true", help="print the expected memory and end: no GPU, launcher or weights needed")
    add("--world_size", type=at_least(1), metavar="N", help="GPUs of the estimate (default: 1)")
    add("--gpu_memory_gib", type=positive, metavar="X", help=f"of each (default: {DEFAULT_GPU_MEMORY_GIB})")
    for action in parser._actions:
        if action.default not in (None, False, -1, argparse.SUPPRESS):
            action.help += " (default: %(default)s)"
    args = parser.parse_args()

    if args.hidden_dim % args.num_heads:
        parser.error(f"--num_heads {args.num_heads} does not divide --hidden_dim {args.hidden_dim}")
    if not args.use_real_data and (args.dataset or args.tokenizer or args.eval_steps):
        parser.error("--dataset, --tokenizer and --eval_steps do nothing without --use_real_data; add it")
    for option in ("dataset", "tokenizer"):
        source = getattr(args, option)
        if source and re.match(r"[./~]|.*\.txt$", source) and not Path(source).exists():  # else the Hub would be asked
            parser.error(f"--{option} {source}: there is no such file or folder")
    if not args.estimate and (args.world_size or args.gpu_memory_gib):
        parser.error("--world_size and --gpu_memory_gib do nothing without --estimate; the launcher sets the ranks")
    args.dataset, args.tokenizer = args.dataset or DEFAULT_DATASET, args.tokenizer or DEFAULT_TOKENIZER
    return args


def load_deepspeed_config(path):
    """Read the JSON at `path`, or Hjson as DeepSpeed does; a mistake in it ends the program with one line."""
    option = f"--deepspeed_config {path}"

    def unique_keys(pairs):
        if len(dict(pairs)) < len(pairs):
            fail(f"{option}: the same key stands twice in one object: {', '.join(key for key, _ in pairs)}")
        return {key: value for key, value in pairs if value is not None}

    def not_a_number(text):
        fail(f"{option}: {text} is not a number that JSON knows; give a finite one")

    try:
        text = Path(path).read_text(encoding="utf-8")
        try:
            config = json.loads(text, object_pairs_hook=unique_keys, parse_constant=not_a_number)
        except json.JSONDecodeError:
            config = hjson.loads(text, object_pairs_hook=unique_keys)  # comments, trailing commas
    except OSError as error:
        fail(f"{option}: {error.strerror or error}; expected a DeepSpeed JSON file such as configs/baseline.json")
    except (ValueError, RecursionError) as error:  # each says where
        fail(f"{option}: not valid JSON: {error}")
    if not isinstance(config, dict):
        fail(f"{option}: expected a JSON object, found a {type(config).__name__}")

    check_config(config, option)
    return config


def is_number(value):
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def check_config(config, option):
    """End the program with one line at the first value that train.py or its estimate cannot work with."""

    def expect(key, right, expected, auto=True):
        """What stands at a dotted key is right, or "auto" where that is allowed, or nothing stands there."""
        *sections, name = key.split(".")
        value = functools.reduce(lambda section, name: section.get(name, {}), sections, config).get(name)
        if not (value is None or (auto and value == "auto") or right(value)):
            fail(f"{option}: {key} is {value!r}; expected {expected}" + (', or "auto"' if auto else ""))

    def is_object(value):
        return isinstance(value, dict)

    def offload_device(value):
        return is_object(value) and value.get("device", "none") in OFFLOAD_DEVICES

    def two_betas(value):
        ok = (
            [beta == "auto" or (is_number(beta) and 0 <= beta < 1) for beta in value] if isinstance(value, list) else []
        )
        return ok == [True, True]

    for key in ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization", "torch_autocast", "compile"):
        expect(key, is_object, "an object", auto=False)
    for key in ("bf16.enabled", "fp16.enabled"):
        expect(key, lambda value: value in (True, False), "true, false")
    for key in BF16_SWITCHES:
        expect(f"bf16.{key}", lambda value: value in (True, False), "true or false", auto=False)
    for key in ("optimizer", "scheduler"):
        if not isinstance(config.get(key, {"type": ""}).get("type"), str):
            fail(f'{option}: {key} has no "type"; expected one such as "AdamW" or "WarmupLR"')
        expect(f"{key}.params", is_object, "an object", auto=False)
    for key in BATCH_KEYS:
        expect(key, lambda value: type(value) is int and value >= 1, "a whole number of at least 1")
    expect("zero_optimization.stage", lambda value: value in (0, 1, 2, 3), "0, 1, 2 or 3", auto=False)
    for key, least in ELEMENT_KEYS.items():
        expected = f"a number of elements of at least {least}"
        expect(
            f"zero_optimization.{key}", lambda value, least=least: is_number(value) and least <= value < 2**63, expected
        )
    for key in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        expect(key, offload_device, 'an object with "device": "cpu"', auto=False)
    expect("gradient_clipping", lambda value: is_number(value) or value in (True, False), "a finite number")
    expect("optimizer.params.lr", lambda value: is_number(value) and value >= 0, "a finite number of at least 0")
    if "Adam" in config.get("optimizer", {}).get("type", ""):
        expect("optimizer.params.eps", lambda value: is_number(value) and value >= 0, "a finite number of at least 0")
        expect("optimizer.params.betas", two_betas, "a list of two numbers from 0 to below 1")

    zero, bf16, optimizer = (config.get(key, {}) for key in ("zero_optimization", "bf16", "optimizer"))
    options = (
        ("bf16", bf16, BF16_SWITCHES),
        ("optimizer.params", optimizer.get("params", {}), ("bf16_stochastic_round",)),
    )
    for where, section, known in options:
        for key in section:
            if key.startswith("bf16_") and key not in known:
                fail(f"{option}: {where}.{key} is unknown; expected {' or '.join(known)}")
    masters, states = (bf16.get(key) for key in BF16_SWITCHES)
    if states and not masters:
        fail(f"{option}: bf16_optimizer_states requires bf16_master_weights_and_grads; set both to true")
    if masters and not zero.get("stage"):
        fail(f"{option}: bf16_master_weights_and_grads requires ZeRO; set zero_optimization.stage to 1, 2 or 3")
    if masters and not states and not offloads(config, "optimizer"):
        needs = "bf16_master_weights_and_grads requires bf16_optimizer_states too, or offload_optimizer on the CPU"
        fail(f"{option}: {needs}; set either")
    if wants_torchao(config):
        if optimizer["type"] not in ("AdamW", "AdamW8bit"):
            fail(f"{option}: bf16_stochastic_round is torchao's option for AdamW and AdamW8bit; change optimizer.type")
        if not masters:
            rounds = f"{optimizer['type']} with bf16_stochastic_round rounds BF16 master weights"
            fail(f"{option}: {rounds}; set bf16.bf16_master_weights_and_grads to true")
        if not importlib.util.find_spec("torchao"):
            fail(f"{option}: its optimizer comes from torchao, which is not installed; pip install torchao")


def wants_torchao(config):
    """Whether the optimizer is one of torchao's: its AdamW where `bf16_stochastic_round` is given, or its AdamW8bit."""
    optimizer = config.get("optimizer", {})
    return optimizer.get("type") == "AdamW8bit" or "bf16_stochastic_round" in optimizer.get("params", {})


def wants_deepcompile(config):
    return config.get("compile", {}).get("deepcompile", False)


def offloads(config, what):
    """Whether the "optimizer" or the "param" is offloaded, also by DeepSpeed's older key; stage 0 never does."""
    zero = config.get("zero_optimization", {})
    older = zero.get({"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what], False)
    return zero.get("stage", 0) > 0 and (older or zero.get(f"offload_{what}", {}).get("device", "none") != "none")


def complete_config(config, args, world_size):
    """Make the DeepSpeed configuration and the command line agree, and fill in every "auto".

    Args:
        config: the JSON as a dict; it is left as it is.
        args: the command line; --batch_size always wins, --learning_rate where given.
        world_size: number of processes.

    Returns:
        (config, notices): a completed copy, and a sentence for each number of the JSON that gave way or was missing.
    """
    config, notices = copy.deepcopy(config), []

    def override(section, key, value):
        if section.get(key, "auto") not in ("auto", value):
            notices.append(f"{key}: {value} is used, the configuration has {section[key]}")
        section[key] = value

    accumulation = config.get("gradient_accumulation_steps", "auto")
    global_batch = config.get("train_batch_size", "auto")
    if accumulation == "auto":  # a global batch alone implies the accumulation, rounded down
        accumulation = 1 if global_batch == "auto" else max(1, global_batch // (args.batch_size * world_size))
    override(config, "train_micro_batch_size_per_gpu", args.batch_size)
    override(config, "gradient_accumulation_steps", accumulation)
    override(config, "train_batch_size", args.batch_size * accumulation * world_size)

    if "optimizer" not in config:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
        notices.append("optimizer: the configuration has none, AdamW is used")
    optimizer_params = config["optimizer"].setdefault("params", {})
    if "scheduler" in config:
        config["scheduler"].setdefault("params", {})  # DeepSpeed would hand on a None
    if args.learning_rate is not None:
        optimizer_params["lr"] = args.learning_rate
        schedule = config.get("scheduler", {}).get("params", {})
        if "warmup_max_lr" in schedule:
            override(schedule, "warmup_max_lr", args.learning_rate)
    lr = optimizer_params.get("lr", "auto")
    lr = DEFAULT_LEARNING_RATE if lr == "auto" else lr

    # The values that the Hugging Face integration fills in (transformers.integrations.deepspeed).
    hidden = args.hidden_dim
    auto = {
        "bf16.enabled": True,
        "fp16.enabled": False,
        "gradient_clipping": 1.0,
        "optimizer.params.lr": lr,
        "optimizer.params.betas": [0.9, 0.999],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.0,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": lr,
        "scheduler.params.warmup_num_steps": 0,
        "scheduler.params.total_num_steps": args.num_steps,
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
    }

    def fill(section, prefix):
        for key, value in section.items():
            if isinstance(value, dict):
                fill(value, f"{prefix}{key}.")
            elif value == "auto" or (isinstance(value, list) and "auto" in value):
                if prefix + key not in auto:
                    fail(f'--deepspeed_config {args.deepspeed_config}: {prefix}{key} cannot be "auto"; give a value')
                section[key] = auto[prefix + key]

    fill(config, "")
    return config, notices


# ---------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------


plain_linear = F.linear  # PyTorch's own, before zero.Init puts a slower one in its place


def matmul(a, b, bias=None):
    """a @ b, plus bias; in fp32 on a CPU whose BF16 products PyTorch has to emulate, up to 30 times slower."""
    if a.device.type == "cpu" and a.dtype == torch.bfloat16 and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        product = matmul(a.float(), b.float(), None if bias is None else bias.float())
        return product.to(a.dtype)
    return a @ b if bias is None else plain_linear(a, b.t(), bias)


class LeanLinear(torch.autograd.Function):
    """linear(x), or linear(gelu(x)), holding less memory than autograd's own under ZeRO-3.

    It saves the parameter itself, not a view, so that ZeRO-3 can free a gathered weight between forward and backward.
    It makes the GELU, the widest activation, again in the backward. It sums the bias's gradient by a matrix product,
    because CUDA's column sum takes a workspace of 64 MiB at these sizes.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, gelu=False):
        """x (..., in), weight (out, in), bias (out) -> (..., out)."""
        ctx.gelu = gelu
        ctx.save_for_backward(x, weight, bias)
        return matmul(F.gelu(x) if gelu else x, weight.t(), bias)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, bias = ctx.saved_tensors
        grad_output = grad_output.flatten(0, -2)
        dtype = grad_output.dtype  # autocast's where it was on in the forward
        rows = (F.gelu(x) if ctx.gelu else x).flatten(0, -2).to(dtype)
        grad_weight = matmul(grad_output.t(), rows)
        grad_bias = matmul(grad_output.t(), grad_output.new_ones(rows.shape[0]))
        grad_x = matmul(grad_output, weight.to(dtype)).view_as(x)
        if ctx.gelu:
            grad_x = torch.ops.aten.gelu_backward(grad_x, x)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None


class CausalSelfAttention(nn.MultiheadAttention):
    """The parameters of nn.MultiheadAttention, used causally and without an attention matrix or mask in memory."""

    def forward(self, x):
        """x: (batch, sequence, hidden) -> the same shape."""
        qkv = LeanLinear.apply(x, self.in_proj_weight, self.in_proj_bias)
        # (batch, sequence, 3 * hidden) -> three times (batch, heads, sequence, head_dim)
        query, key, value = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return LeanLinear.apply(attended.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)


class SimpleTransformerBlock(nn.Module):
    """Causal self-attention and a GELU feed-forward, each with a residual and then LayerNorm (post-norm).

    Args:
        hidden_dim: width of the residual stream.
        num_heads: attention heads; must divide hidden_dim.
        ff_dim: width of the feed-forward; 4 * hidden_dim when None.

    Raises:
        ValueError: a size below 1, or heads that do not divide hidden_dim.
    """

    def __init__(self, hidden_dim, num_heads=8, ff_dim=None):
        super().__init__()
        ff_dim = 4 * hidden_dim if ff_dim is None else ff_dim
        check_sizes(hidden_dim=hidden_dim, num_heads=num_heads, ff_dim=ff_dim)
        if hidden_dim % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide hidden_dim {hidden_dim}")
        self.attention = CausalSelfAttention(hidden_dim, num_heads, batch_first=True)
        self.norm1 = nn.LayerNorm(hidden_dim)
        self.expand = nn.Linear(hidden_dim, ff_dim)
        self.contract = nn.Linear(ff_dim, hidden_dim)
        self.norm2 = nn.LayerNorm(hidden_dim)
        self.activation_checkpointing = False

    def forward(self, x):
        """x: (batch, sequence, hidden) -> the same shape."""
        if not (self.activation_checkpointing and x.requires_grad):
            return self._forward(x)
        # Inside the block, so that ZeRO-3's hooks around it gather the weights once for recomputation and backward.
        # Reentrant, because the forward then builds no graph: less work for the host, which is what limits the step.
        return checkpoint(self._forward, x, use_reentrant=True, preserve_rng_state=False)  # there is no dropout

    def _forward(self, x):
        x = self.norm1(x + self.attention(x))
        wide = LeanLinear.apply(x, self.expand.weight, self.expand.bias)
        return self.norm2(x + LeanLinear.apply(wide, self.contract.weight, self.contract.bias, True))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of a linear layer's logits, which exist only for a slice of the vocabulary at a time.

    The softmax needs one number a token, its log-sum-exp, which is gathered slice by slice; the backward makes each
    slice again. By slices of the vocabulary rather than of tokens, each row of the weight's gradient is one matrix
    product, never a sum of rounded parts.
    """

    @staticmethod
    def chunks(hidden, vocab_size):
        size = max(MIN_VOCAB_CHUNK, LOGITS_CHUNK_ELEMENTS // max(1, hidden.shape[0]))
        return [slice(start, min(start + size, vocab_size)) for start in range(0, vocab_size, size)]

    @staticmethod
    def logits(ctx, hidden, weight, bias, labels, chunk):
        """Of a slice: fp32 logits, weight, and (tokens, 1) each label's column in it and whether it is there."""
        # In the dtype that a plain nn.Linear would use here, then fp32, as the plain loss does.
        weight, bias, column = weight[chunk].to(ctx.dtype), bias[chunk].to(ctx.dtype), labels[:, None] - chunk.start
        inside = column.clamp(0, len(weight) - 1)
        return matmul(hidden, weight.t(), bias).float(), weight, inside, inside == column

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels):
        """hidden (tokens, hidden), weight (vocab, hidden), bias (vocab), labels (tokens) -> fp32 scalar."""
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        states = hidden.to(ctx.dtype)
        log_sum_exp = torch.full(labels.shape, -math.inf, dtype=torch.float32, device=hidden.device)
        label_logit = torch.zeros_like(log_sum_exp)
        for chunk in ChunkedCrossEntropy.chunks(hidden, weight.shape[0]):
            logits, _, column, here = ChunkedCrossEntropy.logits(ctx, states, weight, bias, labels, chunk)
            label_logit += (logits.gather(1, column) * here)[:, 0]
            log_sum_exp = torch.logaddexp(log_sum_exp, logits.logsumexp(-1))
        counted = labels != IGNORE_INDEX
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum_exp)
        return ((log_sum_exp - label_logit) * counted).sum() / counted.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        hidden, weight, bias, labels, log_sum_exp = ctx.saved_tensors
        states = hidden.to(ctx.dtype)
        counted = labels != IGNORE_INDEX
        scale = grad_loss * counted / counted.sum().clamp(min=1)  # d loss / d token loss: (tokens,)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
        ones = states.new_ones(states.shape[0])
        for chunk in ChunkedCrossEntropy.chunks(hidden, weight.shape[0]):
            # softmax minus one-hot, scaled, in the logits' own memory
            grad, chunk_weight, column, here = ChunkedCrossEntropy.logits(ctx, states, weight, bias, labels, chunk)
            grad.sub_(log_sum_exp[:, None]).exp_()
            grad.scatter_add_(1, column, -here.float())
            grad.mul_(scale[:, None])
            grad = grad.to(ctx.dtype)
            grad_weight[chunk] = matmul(grad.t(), states)
            # grad.sum(0), whose CUDA kernel takes a workspace larger than grad
            grad_bias[chunk] = matmul(grad.t(), ones)
            grad_hidden += matmul(grad, chunk_weight)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None


class OutputProjection(nn.Linear):
    """The untied output layer: logits, or with labels the loss without ever holding the logits."""

    def forward(self, hidden, labels=None):
        """hidden (batch, sequence, hidden) -> logits (batch, sequence, vocab), or an fp32 scalar with labels."""
        if labels is None:
            return super().forward(hidden)
        # Position i predicts token i + 1; the last one has nothing to predict.
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return ChunkedCrossEntropy.apply(hidden.flatten(0, 1), self.weight, self.bias, labels.flatten())


class SimpleTransformerModel(nn.Module):
    """A causal language model: token and learned position embeddings, post-norm blocks, untied output projection.

    Args:
        vocab_size, hidden_dim, num_layers, num_heads, max_seq_len: sizes of the model.

    Raises:
        ValueError: a size below 1, or heads that do not divide hidden_dim.
    """

    def __init__(self, vocab_size=50000, hidden_dim=1024, num_layers=12, num_heads=16, max_seq_len=512):
        super().__init__()
        check_sizes(vocab_size=vocab_size, hidden_dim=hidden_dim, num_layers=num_layers, max_seq_len=max_seq_len)
        self.max_seq_len = max_seq_len
        self.token_embedding = nn.Embedding(vocab_size, hidden_dim)
        self.position_embedding = nn.Embedding(max_seq_len, hidden_dim)
        self.layers = nn.ModuleList(SimpleTransformerBlock(hidden_dim, num_heads) for _ in range(num_layers))
        self.output_projection = OutputProjection(hidden_dim, vocab_size)

    def enable_activation_checkpointing(self):
        """Keep only each block's input in the forward and recompute the rest in the backward: same results."""
        for layer in self.layers:
            layer.activation_checkpointing = True

    def forward(self, input_ids, labels=None):
        """Logits, or the loss where labels are given.

        Args:
            input_ids: (batch, sequence) token ids, sequence <= max_seq_len.
            labels: (batch, sequence) token ids, unshifted as in Hugging Face's models; -100 is ignored.

        Returns:
            logits (batch, sequence, vocab_size) without labels; with them the mean next-token cross-entropy, an
            fp32 scalar.

        Raises:
            ValueError: a sequence longer than max_seq_len, or labels of another shape than input_ids.
        """
        if input_ids.shape[1] > self.max_seq_len:
            raise ValueError(f"sequence of {input_ids.shape[1]} tokens is longer than max_seq_len {self.max_seq_len}")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} and input_ids {tuple(input_ids.shape)} differ in shape")
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        for layer in self.layers:
            x = layer(x)
        return self.output_projection(x, labels)


def check_sizes(**sizes):
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def count_parameters(model):
    """Parameters of the whole model as (total, trainable), also where ZeRO-3 holds only a partition of each."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)


# ---------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------


def random_batches(vocab_size, seq_length, batch_size, seed, rank):
    """Endless (batch, sequence) int64 batches of uniform random tokens, others on each rank."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    while True:
        yield torch.randint(vocab_size, (batch_size, seq_length), generator=generator)


def endless(dataloader):
    """The batches of `dataloader` for ever, in a new order each epoch."""
    epoch = 0
    while True:
        dataloader.sampler.set_epoch(epoch)
        yield from dataloader
        epoch += 1


def load_text(dataset_name, tokenizer_name):
    """Tokenise a data set through the cache of `datasets`. Returns (flat int64 token array, tokenizer length)."""
    import datasets
    import numpy as np
    from transformers import AutoTokenizer

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    if Path(dataset_name).exists():
        path = Path(dataset_name)
        files = sorted(map(str, path.rglob("*.txt"))) if path.is_dir() else [str(path)]
        if not files:
            raise ValueError(f"the folder {path} holds no *.txt file")
        dataset = datasets.load_dataset("text", data_files=files, split="train", keep_linebreaks=True)
    else:
        name, _, config = dataset_name.partition(":")
        config = config or (DEFAULT_DATASET_CONFIG if name == DEFAULT_DATASET else None)
        dataset = datasets.load_dataset(name, config, split=DEFAULT_DATASET_SPLIT)
    if "text" not in dataset.column_names:
        raise ValueError(f"the data set has no column 'text', only {', '.join(dataset.column_names)}")

    def tokenize(rows):
        return {"tokens": tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]}

    dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, desc="tokenising")
    column = dataset.data.column("tokens").combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).astype(np.int64), len(tokenizer)


def load_wikitext_data(
    tokenizer_name, seq_length, batch_size, world_size, rank, dataset_name=DEFAULT_DATASET, seed=42, part="all"
):
    """Text as full sequences of tokens, packed without padding, this rank's share of them.

    Args:
        tokenizer_name: a Hub name or a local folder.
        seq_length, batch_size: shape of a batch, in tokens and in sequences on this rank.
        world_size, rank: the data-parallel group; ranks draw disjoint sequences.
        dataset_name: NAME or NAME:CONFIG on the Hub (1 % of its train split), a text file, or a folder of *.txt.
        seed: of the shuffling, which also changes with each epoch.
        part: "all" sequences; or "train", without the last tenth; or "held_out", at most EVAL_BATCHES of that tenth.

    Returns:
        (dataloader, vocab_size): batches are int64 (batch_size, seq_length); vocab_size is the tokenizer's, padded
        up to a multiple of 64.

    Raises:
        ValueError: data or tokenizer cannot be loaded, or the text is too short for one batch on each rank.
    """
    several = dist.is_initialized()
    first_on_node = local_rank() == 0
    if several and not first_on_node:
        dist.barrier()  # the node's first process fills the cache that the others read
    try:
        tokens, tokenizer_length = load_text(dataset_name, tokenizer_name)
    except Exception as error:  # whatever the Hub client, the network or a file raised: the user needs one line
        cause = error.__cause__ or error
        reason = " ".join((str(cause).strip() or type(cause).__name__).split())[:300]
        raise ValueError(
            f"cannot load data set {dataset_name!r} with tokenizer {tokenizer_name!r}: {reason} "
            "(without network: --dataset TEXT_FILE_OR_FOLDER --tokenizer FOLDER)"
        ) from error
    if several and first_on_node:
        dist.barrier()

    num_sequences = len(tokens) // seq_length
    sequences = torch.from_numpy(tokens[: num_sequences * seq_length]).view(num_sequences, seq_length)
    global_batch, first_held_out = batch_size * world_size, math.ceil(num_sequences * 0.9)
    if part == "train":
        sequences = sequences[:first_held_out]
    elif part == "held_out":
        sequences = sequences[first_held_out:][: EVAL_BATCHES * global_batch]
    if len(sequences) < global_batch:
        raise ValueError(
            f"data set {dataset_name!r} is too short: of its {len(tokens)} tokens, {len(sequences)} sequences of "
            f"{seq_length} are for {part.replace('_', ' ')}, one batch on each rank takes {global_batch}; "
            "use more text or a smaller batch"
        )
    sampler = DistributedSampler(
        sequences, num_replicas=world_size, rank=rank, shuffle=part != "held_out", seed=seed, drop_last=True
    )
    dataloader = DataLoader(sequences, batch_size=batch_size, sampler=sampler, drop_last=True)
    return dataloader, math.ceil(tokenizer_length / 64) * 64  # tensor cores like multiples of 64


def load_data(args, rank, world_size, say):
    """(endless training batches, held-out DataLoader or None); sets args.vocab_size to the tokenizer's."""
    if not args.use_real_data:
        return random_batches(args.vocab_size, args.seq_length, args.batch_size, args.seed, rank), None
    data = (args.tokenizer, args.seq_length, args.batch_size, world_size, rank, args.dataset, args.seed)
    try:
        dataloader, args.vocab_size = load_wikitext_data(*data, "train" if args.eval_steps else "all")
        held_out, _ = load_wikitext_data(*data, "held_out") if args.eval_steps else (None, None)
    except ValueError as error:
        fail(error)
    say(f"Data: {args.dataset}, {len(dataloader)} batches an epoch on each rank")
    say(f"Data: the tokenizer's vocabulary, padded to {args.vocab_size}, takes the place of --vocab_size")
    return endless(dataloader), held_out


# ---------------------------------------------------------------------------------------------------
# Measurement
# ---------------------------------------------------------------------------------------------------


def get_memory_stats():
    """This process's memory as integer bytes: {"allocated": ..., "reserved": ..., "peak": ...}.

    On an accelerator these are its allocator's figures, the peak since the process began. On a CPU they are the
    process's resident memory and the kernel's high-water mark of it (VmRSS, VmHWM in proc(5)).
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        status = Path("/proc/self/status").read_text()
        resident, peak = (int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) * 1024 for key in ("VmRSS", "VmHWM"))
        return {"allocated": resident, "reserved": resident, "peak": max(peak, resident)}
    if accelerator.device_name() == "cuda":  # one query of the allocator, where each call below makes one
        stats = torch.cuda.memory_stats()
        return {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "peak": stats.get("allocated_bytes.all.peak", 0),
        }
    return {
        "allocated": accelerator.memory_allocated(),
        "reserved": accelerator.memory_reserved(),
        "peak": accelerator.max_memory_allocated(),
    }


def start_memory_baseline():
    """Resident bytes that the figures on a CPU leave out (imports, data); 0 on an accelerator, which counts tensors."""
    if get_accelerator().device_name() != "cpu":
        return 0
    try:
        # Let glibc map every tensor of 1 MiB or more by itself, so that freed means returned (M_MMAP_THRESHOLD).
        ctypes.CDLL(None).mallopt(-3, 2**20)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew (proc(5))
    except (OSError, AttributeError):
        pass  # another libc or a locked-down /proc: the peak may then include the imports
    return get_memory_stats()["allocated"]


def format_memory(bytes_val):
    """Bytes as text, such as `4.00 GB` (1 GB = 1024**3 bytes)."""
    return f"{bytes_val / 1024**3:.2f} GB"


def model_flops_per_token(model):
    """FLOP of forward and backward a token, without recomputation: 6 N + 12 L H Q T (PaLM, appendix B).

    N leaves out the embedding tables, whose lookups multiply nothing; T is the longest sequence, on which we train.
    """
    total, _ = count_parameters(model)
    hidden_dim = model.output_projection.in_features
    lookups = (model.token_embedding.num_embeddings + model.max_seq_len) * hidden_dim
    return 6 * (total - lookups) + 12 * len(model.layers) * hidden_dim * model.max_seq_len


def peak_tflops():
    """The device's dense BF16 peak, or None for a device that PEAK_TFLOPS does not know."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def model_sizes(args):
    return args.vocab_size, args.hidden_dim, args.num_layers, args.num_heads, args.seq_length


@functools.cache
def parameter_sizes(sizes):
    """(elements of each parameter, largest first, elements of a block), without any memory for them."""
    with torch.device("meta"):
        model = SimpleTransformerModel(*sizes)
    largest_first = sorted((p.numel() for p in model.parameters()), reverse=True)
    return largest_first, sum(p.numel() for p in model.layers[0].parameters())


def estimate_memory(config, args, world_size):
    """Expected bytes of a run, from arithmetic alone.

    Args:
        config: as complete_config returns it.
        args: the command line: sizes of the model, batch and sequence, activation_checkpointing.
        world_size: number of GPUs.

    Returns:
        (device, host): {term: bytes} on each GPU, and in host memory for each process. The states are STATE_PARTS; of
        the terms "backward: ..." all are alive at once, and so are those of "step: ...", but not both.
        None of it knows DeepCompile, pipeline or tensor parallelism, or NVMe.
    """
    zero, bf16 = config.get("zero_optimization", {}), config.get("bf16", {})
    stage = zero.get("stage", 0)
    sizes, block = parameter_sizes(model_sizes(args))
    total, largest = sum(sizes), sizes[0]
    partitions = [math.ceil(size / world_size) for size in sizes] if stage else sizes
    partitioned = sum(partitions)

    # Weights: the model's parameters, partitioned by stage 3. Gradients: one for each of them, partitioned from stage 2
    # on. Master weights and moments: the optimizer's, partitioned from stage 1 on.
    item = 2 if bf16.get("enabled") or config.get("fp16", {}).get("enabled") else 4
    master_item = 2 if bf16.get("bf16_master_weights_and_grads") else 4
    threshold = zero.get("stage3_param_persistence_threshold", 10**5)  # smaller ones are also kept whole
    persistent = sum(size for size in sizes if size < threshold) if stage == 3 and world_size > 1 else 0
    states = {
        "weights": item * (partitioned + persistent if stage == 3 else total),
        "gradients": item * (partitioned if stage >= 2 else total),
        "master_weights": 0 if item == 4 and not stage else master_item * partitioned,
        "moments": 2 * (2 if bf16.get("bf16_optimizer_states") else 4) * partitioned,
    }
    groups = [[0, 0]]  # elements and tensors of each sub-group, as DeepSpeed cuts them
    for size in partitions:
        if stage == 3 and groups[-1][0] >= zero.get("sub_group_size", 10**9):
            groups.append([0, 0])
        groups[-1][0] += size
        groups[-1][1] += 1
    eight_bit = config["optimizer"]["type"] == "AdamW8bit"
    if eight_bit:  # a byte each, and an fp32 scale for each block
        states["moments"] = 2 * partitioned + 2 * partitioned // BLOCK * 4
    device, host = dict(states), {}

    if offloads(config, "optimizer"):
        host = {part: device.pop(part) for part in STATE_PARTS[1:]}
        # A copy for the optimizer, in the master weights' precision, beside what stage 3 reduced or others accumulate.
        kept_too = stage == 3 or config["gradient_accumulation_steps"] > 1
        host["gradients"] = (master_item + (item if kept_too else 0)) * partitioned
    if offloads(config, "param") and stage == 3:
        host["weights"] = device.pop("weights")

    # Activations that a block keeps for its backward, in units of (tokens, hidden): query, key and value 3, attention's
    # output 1, feed-forward 4, and what goes into and comes out of each norm, 4. With checkpointing only its input.
    unit = item * args.batch_size * args.seq_length * args.hidden_dim
    kept = 12 * args.num_layers
    if args.activation_checkpointing:
        kept = min(kept, args.num_layers + 12)
    bucket = min(int(zero.get("reduce_bucket_size", 5 * 10**8)), total)
    waiting = max(bucket, block if stage == 3 else 0)
    live = max(min(int(zero.get("stage3_max_live_parameters", 10**9)), total), largest, block)
    device["workspace (cuBLAS)"] = WORKSPACE_BYTES
    device["backward: activations"] = unit * (kept + 1)
    loss = 8 * LOGITS_CHUNK_ELEMENTS + 2 * unit  # a slice of the logits in fp32 and twice in BF16, the states' gradient
    # A gradient larger than the bucket is reduced by itself and needs no flat copy.
    device["backward: a block's or bucket's gradients, their flat copy"] = item * max(largest, waiting + bucket)
    if stage == 3 and (world_size > 1 or offloads(config, "param")):
        device["backward: gathered weights"] = item * live
    if offloads(config, "optimizer"):
        transit = (item + 4) * partitions[0]
        device["backward: the loss, or a gradient sent to the host, also in FP32"] = max(loss, transit)
    else:
        device["backward: the loss (a slice of the logits, FP32 and twice BF16)"] = loss
        cast = master_item if master_item != item else 0
        # A tensor that is a sub-group by itself is flat already; the masters' gradient is cast to their precision.
        device["step: a sub-group's flat gradient, and its cast to FP32"] = max(
            ((item if tensors > 1 else 0) + cast) * elements for elements, tensors in groups
        )
        if eight_bit:
            device["step: a piece's two 8-bit moments in FP32"] = 8 * min(PIECE, max(groups)[0])
    return device, host


def expected_peak(device):
    """The highest sum of what is alive at once, of estimate_memory's terms for a GPU."""
    backward, step = (sum(s for term, s in device.items() if term.startswith(phase)) for phase in ("backward", "step"))
    return sum(device.values()) - min(backward, step)


def report_estimate(args, config):
    """Print what estimate_memory expects, term by term, the fewest GPUs that hold it, and a line for programs."""
    world_size, memory_gib = args.world_size or 1, args.gpu_memory_gib or DEFAULT_GPU_MEMORY_GIB
    try:
        parameters = sum(parameter_sizes(model_sizes(args))[0])
        device, host = estimate_memory(config, args, world_size)
    except RuntimeError as error:
        fail(f"no such model can be: {str(error).splitlines()[0]}; give smaller sizes")
    if "Adam" not in config["optimizer"]["type"]:
        print(f"Notice: {config['optimizer']['type']} is counted with the two moments of Adam")
    if wants_deepcompile(config):
        print("Notice: DeepCompile holds more than is counted here, 1.2 GB on the published 254M run")
    if "nvme" in json.dumps(config.get("zero_optimization", {})):
        print("Notice: what is offloaded to NVMe is counted as host memory")
    print(f"Estimate of {args.deepspeed_config}: {parameters:,} parameters on {world_size} GPU(s)")
    words = {False: "without activation checkpointing", True: "with activation checkpointing"}
    print(f"Batch {args.batch_size} x {args.seq_length} tokens on each, {words[args.activation_checkpointing]}")
    for title, terms in (("Each GPU", device), ("Host memory of each process, its own few GB left out", host)):
        print(f"{title}:" if terms else f"{title}: none")
        for term, size in terms.items():
            per_parameter = size * world_size / parameters
            print(f"  {term:63} {format_memory(size):>12} {per_parameter:6.2f} bytes/parameter")
    print("The backward's terms and the step's are not alive at the same time: the peak has the larger sum of the two.")
    room = (memory_gib * 2**30 - CUDA_CONTEXT_BYTES) / RESERVED_SHARE
    peaks, fewest = {}, {}
    for asked, text in words.items():
        variant = argparse.Namespace(**{**vars(args), "activation_checkpointing": asked})
        peak = peaks[asked] = expected_peak(estimate_memory(config, variant, world_size)[0])
        enough = (n for n in range(1, MOST_GPUS + 1) if expected_peak(estimate_memory(config, variant, n)[0]) <= room)
        fewest[asked] = next(enough, 0)
        fits = "fits" if peak <= room else "does not fit"
        print(
            f"Peak {text}: {format_memory(peak)} on each, {peak * world_size / parameters:.2f} bytes/parameter: {fits} "
            f"in {memory_gib:g} GiB with a tenth and 1 GiB to spare; the fewest GPUs that hold it: "
            f"{fewest[asked] or f'more than {MOST_GPUS}'}"
        )
    fields = {
        "params": parameters,
        "world_size": world_size,
        "peak_mem_bytes": peaks[args.activation_checkpointing],
        "model_state_bytes": sum(device.get(part, 0) for part in STATE_PARTS),
        "host_bytes": sum(host.values()),
        "fewest_gpus": fewest[args.activation_checkpointing],
    }
    print(summary_line(args.deepspeed_config, "ESTIMATE", **fields))


class UpdateProbe:
    """How much of AdamW's update reaches the master weights, measured on a fixed random sample of them.

    `applied` is their change in a step. It is held against AdamW's update in fp32 (Loshchilov & Hutter 2019, algorithm
    2), -lr * (exp_avg / (1 - beta1^t) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps) + weight_decay * weight), of which
    there are two: `intended`, from the optimizer's own moments after the step, and `exact`, on another, smaller sample,
    from moments that are kept in fp32 here, of the same gradients since the first step.

        update ratio = <applied, intended> / <intended, intended>    what the rounding of weights leaves
        adam ratio   = <applied, exact> / <exact, exact>             what the rounding of weights and moments leaves

    Exact arithmetic applies what is intended: both are 1. So does stochastic rounding in expectation: its error has
    mean zero whatever `intended` is, and averages out over the sample. Rounding to nearest drops each update smaller
    than half the spacing of its weight: both fall. The adam ratio alone shows what moments lose by rounding. With 8-bit
    moments it is the only one: those that are rounded to 0 after the step say nothing of what it intended. Both count
    what goes along AdamW's update, not what goes across it.
    """

    SUPPORTED = ("AdamW", "AdamW8bit", "FusedAdam", "DeepSpeedCPUAdam")  # with decoupled weight decay

    def __init__(self, optimizer, seed, share):
        """`share` of the elements of each master weight are sampled, all of them from 1 on."""
        self.optimizer, self.seed, self.share, self.parts = optimizer, seed, share, []
        self.generator = torch.Generator().manual_seed(seed)
        self.exact = {}  # of each master weight: sampled elements, exp_avg and exp_avg_sq in fp32
        self.gradients = {}  # of a step, in the same order
        self.supported = type(optimizer).__name__ in self.SUPPORTED and getattr(optimizer, "adam_w_mode", True)
        if self.supported:
            optimizer.register_step_pre_hook(self.sample_gradients)

    @staticmethod
    def sampled(tensor, index):
        return tensor.detach().flatten().index_select(0, index).float()

    @staticmethod
    def draw(weight, share, generator):
        """Indices of a random `share` of the weight's elements, all of them in order from 1 on."""
        size = weight.numel()
        count = math.ceil(share * size)
        index = torch.randint(size, (count,), generator=generator) if count < size else torch.arange(size)
        return index.to(weight.device, torch.int32 if size < 2**31 else torch.int64)

    def sample_gradients(self, optimizer, *_):
        """Before each step of the optimizer, which ZeRO-3 takes for one sub-group at a time."""
        self.betas = optimizer.param_groups[0]["betas"]  # a scheduler changes them after the step
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            if weight.grad is not None:
                if weight not in self.exact:
                    index = self.draw(weight, self.share * EXACT_PART, self.generator)
                    self.exact[weight] = (index, *torch.zeros(2, len(index), device=weight.device))
                self.gradients[weight] = self.sampled(weight.grad, self.exact[weight][0])

    def keep_moments(self):
        """After each step: move the fp32 moments by the gradients that it took."""
        if self.gradients:
            gradients = list(self.gradients.values())
            beta1, beta2 = self.betas
            exp_avg, exp_avg_sq = zip(*(self.exact[weight][1:] for weight in self.gradients), strict=True)
            torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
            torch._foreach_mul_(exp_avg_sq, beta2)
            torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)
            self.gradients = {}

    def before_step(self):
        """Remember the sampled weights. Before the first step none are known, and nothing is sampled."""
        generator = torch.Generator().manual_seed(self.seed)
        self.group = dict(self.optimizer.param_groups[0])  # a scheduler changes lr after the step
        for weight, (exact_index, *_) in self.exact.items():
            if not weight.numel():  # swapped to NVMe
                continue
            samples, state = {"exact": exact_index}, self.optimizer.state.get(weight, {})
            if "exp_avg" in state and state["exp_avg"].shape == weight.shape:  # not 8-bit
                samples["intended"] = self.draw(weight, self.share, generator)
            self.parts += [(weight, kind, index, self.sampled(weight, index)) for kind, index in samples.items()]

    def after_step(self):
        """Sums over this rank's sample: <applied, intended>, <intended, intended>, weights changed, weights;
        <applied, exact>, <exact, exact>."""
        sums = {"intended": [0.0] * 4, "exact": [0.0] * 4}
        if self.parts:
            lr, eps, weight_decay = (float(self.group[key]) for key in ("lr", "eps", "weight_decay"))
            beta1, beta2 = self.group["betas"]
            t = max(float(state["step"]) for state in self.optimizer.state.values())
        for weight, kind, index, before in self.parts:
            if kind == "exact":
                _, exp_avg, exp_avg_sq = self.exact[weight]
            else:
                state = self.optimizer.state[weight]
                exp_avg, exp_avg_sq = (self.sampled(state[name], index) for name in ("exp_avg", "exp_avg_sq"))
            denominator = (exp_avg_sq / (1 - beta2**t)).sqrt() + eps
            update = -lr * (exp_avg / (1 - beta1**t) / denominator + weight_decay * before)
            applied = self.sampled(weight, index) - before
            terms = (applied * update, update * update, applied != 0, torch.ones_like(before))
            sums[kind] = [a + term.double().sum().item() for a, term in zip(sums[kind], terms, strict=True)]
        self.parts = []
        return sums["intended"] + sums["exact"][:2]


def model_states(engine):
    """The model states that are alive on this rank, from the tensors themselves.

    Returns:
        {(part, dtype, device type): bytes}; the parts are STATE_PARTS. A storage counts once, in the first part that
        holds it, so that a weight which is its own master counts as a weight.
    """
    zero, optimizer = engine.optimizer, engine.basic_optimizer
    weights = [tensor for p in engine.module.parameters() for tensor in (getattr(p, "ds_tensor", None), p)]
    masters = list(optimizer.state)
    gradients = [tensor.grad for tensor in (*engine.module.parameters(), *masters)]
    gradients.append(getattr(zero, "grad_partitions_flat_buffer", None))  # ZeRO-3
    gradients.extend(getattr(zero, "accumulated_grads_in_cpu", {}).values())  # ZeRO-1 and 2, where they accumulate
    moments = [tensor for state in optimizer.state.values() for name, tensor in state.items() if "exp_avg" in name]
    states, seen = {}, set()
    for part, tensors in zip(STATE_PARTS, (weights, gradients, masters, moments), strict=True):
        for tensor in tensors:
            inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []  # 8-bit moments
            for piece in [getattr(tensor, name) for name in inner] or [tensor]:
                if piece is not None and piece.numel() and piece.untyped_storage().data_ptr() not in seen:
                    seen.add(piece.untyped_storage().data_ptr())
                    key = (part, str(piece.dtype).removeprefix("torch."), piece.device.type)
                    states[key] = states.get(key, 0) + piece.untyped_storage().nbytes()
    return states


def over_ranks(values, op):
    """`values` (numbers) combined elementwise over all ranks by the name of a reduction, such as "MAX"."""
    if dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor.tolist()


def tail_mean(values, num_steps):
    """Mean over the last tenth of the steps of `values`, pairs of (step, value); the last one where it has none."""
    first = num_steps - math.ceil(num_steps / 10)
    return statistics.fmean([value for step, value in values if step >= first] or [values[-1][1]])


def environment_line():
    """One `ENV:` line: device and versions, values without spaces."""
    import deepspeed

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    versions = f"torch={torch.__version__} cuda={torch.version.cuda or 'none'} deepspeed={deepspeed.__version__}"
    return f"ENV: device={device.replace(' ', '_')} {versions} python={platform.python_version()}"


def summary_line(config_path, marker="SUMMARY", **fields):
    """A line for programs: white space is percent-encoded in the path and an underscore in the values."""
    config = re.sub(r"[\s%]", lambda match: quote(match[0]), config_path)
    return " ".join([f"{marker}: config={config}", *(f"{k}={str(v).replace(' ', '_')}" for k, v in fields.items())])


# ---------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------


def check_device(args, config):
    """End the program with one line where this node's devices cannot do what is asked."""
    accelerator, option = get_accelerator(), f"--deepspeed_config {args.deepspeed_config}"
    if accelerator.device_name() == "cpu":
        if wants_deepcompile(config):
            fail(f"{option}: compile.deepcompile needs a GPU; take it out of the JSON")
        if args.memory_snapshot:
            fail("--memory_snapshot needs a GPU: it records PyTorch's GPU allocator; leave it out")
        return
    rank, found = local_rank(), accelerator.device_count()
    if rank >= found:  # the first of them says it
        fail(f"process {rank} of this node has no GPU: there are {found}; lower --num_gpus", every_rank=rank == found)
    on_cuda = torch.cuda.is_available()  # PyTorch also counts older GPUs, on which it emulates BF16
    native = torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else accelerator.is_bf16_supported()
    if config.get("bf16", {}).get("enabled") and not native:
        fail(f"{option}: this GPU has no BF16; take one from NVIDIA's Ampere on")


def start_distributed(args):
    """Join the process group that the launcher describes, or be a group of one. Returns (rank, world_size)."""
    import deepspeed

    if "RANK" not in os.environ and mpi_world_size() == 1:  # started without a launcher
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # PyTorch would warn at each step that DeepSpeed calls collectives by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed(verbose=False)  # under MPI this sets LOCAL_RANK
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(local_rank())
    else:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_SIZE", 1))))
        # DeepSpeed leaves 66 MiB of each process in shared memory for ever; without a name it goes with the processes.
        deepspeed.comm.barrier()  # until every rank has opened it
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_*_{os.environ['MASTER_PORT']}_{deepspeed.comm.get_rank()}"
        for buffer in Path("/dev/shm").glob(name):
            buffer.unlink(missing_ok=True)
    return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


def operator_locks():
    """Files that say that operators are being compiled; a killed compilation leaves its own, and all others wait."""
    from torch.utils.cpp_extension import get_default_build_root

    return sorted(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).glob("**/lock"))


def mpi_world_size():
    """Processes of the MPI launcher that started this one, 1 where none did."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)


def torchao_adamw(parameters, type_name, params):
    """torchao's AdamW, or its AdamW8bit: at their option `bf16_stochastic_round`, BF16 weights round stochastically.

    Each update is computed in fp32 and rounded up or down at random, so that the weights move as intended on average.
    """
    from torchao import optim

    eight_bit = type_name == "AdamW8bit"

    class TorchaoAdamW(optim.AdamW8bit if eight_bit else optim._AdamW):
        def step(self, closure=None):
            given = [(group["lr"], group["params"]) for group in self.param_groups]
            for group in self.param_groups:
                # torchao compiles over a tensor, schedulers and logs want a number
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
                if eight_bit:
                    group["params"] = [piece for p in group["params"] if p.grad is not None for piece in pieces(p)]
            super().step(closure)
            if eight_bit:
                self.zero_grad()  # the pieces hold views of the gradient
            for group, (lr, params) in zip(self.param_groups, given, strict=True):
                group.update(lr=lr, params=params)

        def _new_buffer(self, p, signed):
            return self._subclass_zeros(p, signed, BLOCK) if eight_bit and p.numel() >= BLOCK else torch.zeros_like(p)

    views = {}

    def pieces(p):
        """The whole blocks of a weight in PIECEs, and the fewer than BLOCK elements that are left, with gradients.

        torchao by itself keeps full-size moments for a tensor that its blocks do not divide, as a flat ZeRO partition.
        """
        whole = p.numel() // BLOCK * BLOCK
        sizes = [PIECE] * (whole // PIECE) + [size for size in (whole % PIECE, p.numel() - whole) if size]
        if p not in views:
            views[p] = p.detach().view(-1).split(sizes)
        for part, gradient in zip(views[p], p.grad.view(-1).split(sizes), strict=True):
            part.grad = gradient
        return views[p]

    TorchaoAdamW.__name__ = type_name  # what DeepSpeed and UpdateProbe go by
    optimizer = TorchaoAdamW(parameters, **params)
    optimizer.param_groups[0]["lr"] = params["lr"]
    return optimizer


def norm_of_all(zero):
    """ZeRO-3's gradient norm as a list of one, not finite where a gradient is not; in place of its _get_norm_groups.

    That takes one for each sub-group, of copies of the gradients in FP64, each with a reduction over the ranks.
    """
    import deepspeed

    gradients = [gradient for group in zero.averaged_gradients.values() for gradient in group]
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    square = norms.square().sum()
    deepspeed.comm.all_reduce(square, group=zero.dp_process_group)
    return [square.sqrt()]


def flatten_on_device(tensors):
    """One flat buffer that `tensors` become views of, as DeepSpeed's defragment, which goes through host memory.

    For a moment the device holds the weights twice, less than it later holds states, unless those are offloaded.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for tensor, view in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = view
    get_accelerator().empty_cache()
    return flat


def create_engine(args, config):
    """Model and DeepSpeed engine; a configuration that DeepSpeed refuses ends the program with its reason."""
    import deepspeed

    zero3 = config.get("zero_optimization", {}).get("stage", 0) == 3
    deepcompile = wants_deepcompile(config)
    if args.memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    deepspeed.utils.nvtx.enable_nvtx = False  # thousands of Python calls a step that only a profiler would see
    for stages in (deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2):
        stages.get_norm_dtype = lambda: torch.float32  # a copy of each gradient in fp32, not fp64, for its norm
    if not offloads(config, "optimizer"):
        # Without it a process takes as much host memory as it has weights, 12.8 GB at 6.86B.
        deepspeed.runtime.zero.stage3.defragment = flatten_on_device
    torch.manual_seed(args.seed)
    try:
        with (
            torch.device(get_accelerator().current_device_name()),
            # Partitions each parameter as it is made, so that no rank ever holds the whole model in fp32.
            deepspeed.zero.Init(config_dict_or_path=config, enabled=zero3),
        ):
            model = SimpleTransformerModel(*model_sizes(args))
        if zero3:  # nn.MultiheadAttention sets these to 0 only after zero.Init has taken them apart
            biases = [layer.attention.out_proj.bias for layer in model.layers]
            with deepspeed.zero.GatheredParameters(biases, modifier_rank=0):
                for bias in biases:
                    nn.init.zeros_(bias)
        if args.activation_checkpointing:
            model.enable_activation_checkpointing()
        if zero3 and not deepcompile:  # gather a block's weights in one go instead of module by module
            deepspeed.utils.set_z3_leaf_modules(model, [SimpleTransformerBlock])
        parameters, optimizer = list(model.parameters()), None
        if zero3:  # a large gradient that is a sub-group by itself is stepped where it is, not flattened into a copy
            parameters.sort(key=lambda p: -p.ds_numel)
        if wants_torchao(config):
            config = dict(config)
            section = config.pop("optimizer")  # DeepSpeed knows no such optimizer: it gets it made
            optimizer = torchao_adamw(parameters, section["type"], section["params"])
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, optimizer=optimizer, config=config)
        zero = engine.optimizer
        for of_block in getattr(zero, "leaf_parameters", {}).values():
            of_block.sort(key=lambda p: p.ds_numel)  # large gradients overflow the bucket: let small ones share one
        # Offloaded gradients have norms of their own; Muon's updates may need a scale that norm_of_all leaves out.
        if zero3 and not zero.offload_optimizer and not getattr(zero, "use_muon", False):
            zero._get_norm_groups = functools.partial(norm_of_all, zero)
        if deepcompile:
            engine.compile()
        torch.manual_seed(args.seed + engine.global_rank)  # each has weights of its own to round stochastically
    except Exception as error:
        if out_of_memory(error) or peer_ended(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join(reason[:1] if isinstance(error, RuntimeError) else reason)  # no C++ frames
        fail(f"--deepspeed_config {args.deepspeed_config}: DeepSpeed cannot start with it: {reason}")
    return engine


def train_step(engine, micro_batches, progress):
    """One optimizer step over the micro batches. Returns their mean loss, a detached fp32 scalar."""
    losses = []
    for input_ids in micro_batches:
        progress["phase"] = "forward"
        loss = engine(input_ids, labels=input_ids)
        progress["phase"] = "backward"
        engine.backward(loss)
        progress["phase"] = "optimizer step"
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def evaluate(engine, dataloader, device):
    """Mean loss over the batches of this rank, without training."""
    engine.eval()
    with torch.no_grad():
        losses = [engine(input_ids, labels=input_ids) for input_ids in (batch.to(device) for batch in dataloader)]
    engine.train()
    return torch.stack(losses).mean().item()


def open_log(option, path, mode):
    """A CSV, written line by line so that a killed run keeps what it had; parent folders are made."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, mode, buffering=1, encoding="utf-8")
    except OSError as error:
        fail(f"{option} {path}: {error.strerror or error}; give a path that can be written")


def out_of_memory(error):
    """The bytes that could not be had, as text, where `error` says that memory ran out; else None."""
    text = str(error)
    others = "DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory"  # host, workspace, pinned
    if not isinstance(error, torch.OutOfMemoryError) and not re.search(others, text):
        return None
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?(\w+)", text)
    return f"{found[1]} {found[2]}" if found else "an unknown size"


def peer_ended(error):
    return bool(re.search(r"Connection (closed|reset) by peer|remote worker", str(error)))


def end_out_of_memory(error, args, progress):
    """End the run with one line on stderr and a `FAILED:` line, which the table shows as OOM."""
    asked, memory = out_of_memory(error), get_memory_stats()
    fields = {"asked": asked, "peak_mem_bytes": memory["peak"], "reserved_mem_bytes": memory["reserved"]}
    print(summary_line(args.deepspeed_config, "FAILED", reason="OOM", **progress, **fields), flush=True)
    write_snapshot(args)
    where = (
        f"in the {progress['phase']} of step {progress['step']}" if "step" in progress else f"in {progress['phase']}"
    )
    fail(
        f"out of memory {where}: {asked} more asked for, the peak so far is {format_memory(memory['peak'])}, "
        f"{format_memory(memory['reserved'])} are reserved; try --activation_checkpointing, a smaller --batch_size, "
        "more GPUs, a configuration with BF16 states or offload, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        status=1,
        every_rank=True,
    )


def write_snapshot(args):
    """PyTorch's record of the allocations so far, where --memory_snapshot asks for it."""
    if args.memory_snapshot:
        torch.cuda.memory._dump_snapshot(args.memory_snapshot)


def measure_memory(args, config, engine, memory, world_size, say):
    """The memory fields of the report, the highest of all ranks; says what the states of this rank are made of.

    `memory` is a function that returns what get_memory_stats does, less what the run does not answer for.
    """
    here = get_accelerator().device_name()
    states = model_states(engine)
    state_bytes = [
        sum(size for (name, _, at), size in states.items() if (name, at) == (part, here)) for part in STATE_PARTS
    ]
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of the process since it began
    measured = map(int, over_ranks([*memory().values(), host_peak, *state_bytes], "MAX"))
    allocated, reserved, peak, host_peak, *state_bytes = measured
    for (part, dtype, place), size in states.items():
        say(f"State on {place}: {part} {size} bytes {dtype}")
    rest = "the process and freed memory that it keeps" if here == "cpu" else "cuBLAS's workspace, DeepSpeed's buffers"
    say(f"Allocated beyond the states: {format_memory(max(0, allocated - sum(state_bytes)))}: {rest}")

    expected, expected_on_host = estimate_memory(config, args, world_size)
    if here == "cpu":  # where the host is the device
        expected.update(expected_on_host)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    freed = () if stage == 3 or offloads(config, "optimizer") else ("gradients",)  # by the step
    return {
        "peak_mem_bytes": peak,
        "alloc_mem_bytes": allocated,
        "reserved_mem_bytes": reserved,
        "host_peak_bytes": host_peak,
        "model_state_bytes": sum(state_bytes),
        **{f"{part}_bytes": size for part, size in zip(STATE_PARTS, state_bytes, strict=True)},
        "expected_state_bytes": sum(expected.get(part, 0) for part in STATE_PARTS if part not in freed),
        **({} if here == "cpu" or wants_deepcompile(config) else {"expected_peak_bytes": expected_peak(expected)}),
    }


def measure_speed(args, config, engine, step_times_s, world_size, say):
    """(mean step time in seconds, the report's other fields of speed), over the steps after the warm-up."""
    asked = max(args.warmup_steps, DEEPCOMPILE_WARMUP_STEPS if wants_deepcompile(config) else 0)
    warmup_steps = min(asked, args.num_steps - 1)
    if warmup_steps < asked:
        say(f"Notice: {args.num_steps} step(s) leave none after {asked} of warm-up: the last one is timed")
    timed_s = step_times_s[warmup_steps:]
    mean_s = statistics.fmean(timed_s)
    tokens_per_second_per_gpu = engine.gradient_accumulation_steps() * args.batch_size * args.seq_length / mean_s
    tflops_per_gpu = tokens_per_second_per_gpu * model_flops_per_token(engine.module) / 1e12
    return mean_s, {
        "median_step_time": f"{statistics.median(timed_s):.4f}",
        "timed_steps": len(timed_s),
        "tokens_per_second": f"{world_size * tokens_per_second_per_gpu:.1f}",
        "tokens_per_second_per_gpu": f"{tokens_per_second_per_gpu:.1f}",
        "model_tflops_per_gpu": f"{tflops_per_gpu:.3f}",
        **({"mfu": f"{tflops_per_gpu / peak_tflops():.4f}"} if peak_tflops() else {}),
    }


def report(config_path, fields):
    """The results block, the ENV line and, last, the SUMMARY line, which has the block's fields in the same order."""
    lines = ["", "=" * 78, f"RESULTS of {config_path} (memory: highest rank; time: slowest rank; loss: mean of ranks)"]
    for key, value in fields.items():
        text = f"{value} = {format_memory(value)}" if key.endswith("_bytes") else value
        unit = " s" if key.endswith("_time") else ""
        lines.append(f"  {key + ':':30}{text}{unit}")
    return [*lines, "=" * 78, environment_line(), summary_line(config_path, **fields)]


def main():
    """Train, measure and report. Returns peak, allocation, time, losses and SUMMARY line; None after --estimate."""
    sys.stdout.reconfigure(errors="backslashreplace")  # no path or text can end a run for want of a character
    args = get_args()
    config = load_deepspeed_config(args.deepspeed_config)
    if args.estimate:
        report_estimate(args, complete_config(config, args, args.world_size or 1)[0])
        return None
    # Older launchers give the option alone.
    os.environ.setdefault("LOCAL_RANK", str(max(args.local_rank, local_rank())))
    config, notices = complete_config(config, args, int(os.environ.get("WORLD_SIZE") or mpi_world_size()))
    for lock in operator_locks() if local_rank() == 0 else ():
        print(f"Notice: {lock} exists: what needs it waits till it is compiled; if nothing does, remove it", flush=True)
    check_device(args, config)
    rank, world_size = start_distributed(args)
    if args.memory_snapshot and world_size > 1:
        path = Path(args.memory_snapshot)
        args.memory_snapshot = str(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))
    progress = {"phase": "creating model and optimizer"}
    try:
        return run(args, config, notices, rank, world_size, progress)
    except RuntimeError as error:
        if out_of_memory(error):
            end_out_of_memory(error, args, progress)
        if peer_ended(error):
            fail("another process ended, and this one with it; that one's own line says why", 1, every_rank=True)
        raise


def run(args, config, notices, rank, world_size, progress):
    """main() within the process group; `progress` always says which step and phase it is in."""
    import deepspeed
    from tqdm import tqdm

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    device = accelerator.current_device_name()

    def say(*lines):
        if rank == 0:
            for line in lines:
                tqdm.write(line)  # to stdout, above the progress bar where there is one
            sys.stdout.flush()

    say(*(f"Notice: {notice}" for notice in notices))
    if on_cpu:
        say("Notice: no accelerator; memory is the process's resident memory, less what it used before the model")
        if sum(parameter_sizes(model_sizes(args))[0]) * args.batch_size * args.seq_length > 2 * 10**11:
            say("Notice: steps of this size take a minute or more on a CPU; run_all.sh has a size for it")
    columns = {"loss_log_file": 2, "memory_log_file": len(MEMORY_LOG_COLUMNS)} if rank == 0 else {}
    for option in (*columns, "memory_snapshot"):
        if path := getattr(args, option):
            open_log(f"--{option}", path, "a").close()  # fail now, but empty it only once there is a run to log
    batches, held_out = load_data(args, rank, world_size, say)
    baseline_bytes = start_memory_baseline()

    def memory():
        return {key: max(0, value - baseline_bytes) for key, value in get_memory_stats().items()}

    engine = create_engine(args, config)
    accumulation = engine.gradient_accumulation_steps()
    total_parameters, trainable_parameters = count_parameters(engine.module)
    init_peak = int(over_ranks([memory()["peak"]], "MAX")[0])
    say(f"Model: {total_parameters:,} parameters, {trainable_parameters:,} trainable")
    say(f"Initialised: peak={format_memory(init_peak)}")

    probe = UpdateProbe(engine.basic_optimizer, args.seed, UPDATE_SAMPLES / total_parameters)
    update_ratios, changed_shares, adam_ratios = [], [], []
    if not probe.supported:
        say(f"Notice: no update ratio: it is defined for AdamW, not for {type(engine.basic_optimizer).__name__}")
    if wants_torchao(config):
        say("Notice: the first step compiles torchao's optimizer, which takes up to a minute")

    logs = {open_log(f"--{option}", path, "w"): n for option, n in columns.items() if (path := getattr(args, option))}

    def write_row(*cells):
        for log, width in logs.items():
            log.write(",".join(cells[:width]) + "\n")

    write_row(*MEMORY_LOG_COLUMNS)

    gc.collect()
    gc.freeze()  # a collection during the steps need not walk the engine's objects
    loss_history, step_times_s, tracking_s = [], [], 0.0
    for step in tqdm(range(args.num_steps), unit="step", disable=rank > 0 or not sys.stderr.isatty()):
        progress["step"] = step
        micro_batches = [next(batches).to(device) for _ in range(accumulation)]
        log_step = step % args.log_interval == 0 or step == args.num_steps - 1
        if log_step and probe.supported:
            probe.before_step()
        accelerator.synchronize()
        start = time.perf_counter()
        loss = train_step(engine, micro_batches, progress)
        accelerator.synchronize()
        end = time.perf_counter()
        elapsed_s = end - start

        progress["phase"] = "measurement"
        loss = over_ranks([loss.item()], "SUM")[0] / world_size
        elapsed_s, *highest = over_ranks([elapsed_s, *memory().values()], "MAX")
        step_times_s.append(elapsed_s)
        loss_history.append((step, loss))
        write_row(str(step), f"{loss:.6f}", f"{elapsed_s:.6f}", *(f"{value:.0f}" for value in highest))
        probe.keep_moments()
        tracking_s += time.perf_counter() - end
        if log_step:
            allocated, reserved, peak = map(format_memory, highest)
            line = f"Step {step}: loss={loss:.4f}, time={elapsed_s:.4f}s"
            line += f", allocated={allocated}, reserved={reserved}, peak={peak}"
            product, square, changed, sampled, exact_product, exact_square = over_ranks(probe.after_step(), "SUM")
            if square > 0:
                update_ratios.append(product / square)
                changed_shares.append(changed / sampled)
                line += f", update_ratio={update_ratios[-1]:.3f}, changed_share={changed_shares[-1]:.3f}"
            if exact_square > 0:
                adam_ratios.append((step, exact_product / exact_square))
                line += f", adam_ratio={adam_ratios[-1][1]:.3f}"
            say(line)
        if not math.isfinite(loss):
            say(summary_line(args.deepspeed_config, "FAILED", reason="NOT_FINITE", step=step, loss=loss))
            fail(f"the loss is {loss} at step {step}; lower --learning_rate, or gradient_clipping in the JSON", 1)
        if args.eval_steps and ((step + 1) % args.eval_steps == 0 or step == args.num_steps - 1):
            progress["phase"] = "evaluation"
            eval_loss = over_ranks([evaluate(engine, held_out, device)], "SUM")[0] / world_size
            say(f"Held-out text after step {step}: eval_loss={eval_loss:.4f}")
    for log in logs:
        log.close()

    progress["phase"] = "report"
    del micro_batches  # what is left is the model and the optimizer, not the last step's data
    gc.collect()
    write_snapshot(args)
    memory_fields = measure_memory(args, config, engine, memory, world_size, say)
    mean_s, speed_fields = measure_speed(args, config, engine, step_times_s, world_size, say)
    fields = {
        "params": total_parameters,
        **{key: memory_fields[key] for key in ("peak_mem_bytes", "alloc_mem_bytes")},
        "avg_step_time": f"{mean_s:.4f}",
        "world_size": world_size,
        "init_peak_mem_bytes": init_peak,
        **memory_fields,
        **speed_fields,
        "tracking_time": f"{tracking_s / args.num_steps:.6f}",
        "final_loss": f"{loss:.4f}",
        "tail_loss": f"{tail_mean(loss_history, args.num_steps):.4f}",
        **({"eval_loss": f"{eval_loss:.4f}"} if args.eval_steps else {}),
        **({"update_ratio": f"{statistics.fmean(update_ratios):.4f}"} if update_ratios else {}),
        **({"changed_share": f"{statistics.fmean(changed_shares):.4f}"} if changed_shares else {}),
        **({"adam_ratio": f"{tail_mean(adam_ratios, args.num_steps):.4f}"} if adam_ratios else {}),
        **{key: getattr(args, key) for key in (*SHAPE_KEYS, "num_steps", "seed")},
        "learning_rate": config["optimizer"]["params"].get("lr", "default"),
        "data": args.dataset if args.use_real_data else "random_tokens",
        "gradient_accumulation_steps": accumulation,
        "activation_checkpointing": int(args.activation_checkpointing),
        "memory": "process_resident" if on_cpu else "device_allocator",
    }
    lines = report(args.deepspeed_config, fields)
    say(*lines)

    engine.destroy()
    deepspeed.comm.destroy_process_group()
    return {
        "peak_memory": fields["peak_mem_bytes"],
        "allocated_memory": fields["alloc_mem_bytes"],
        "avg_step_time": mean_s,
        "loss_history": loss_history,
        "summary_line": lines[-1],
    }


if __name__ == "__main__":
    main()
