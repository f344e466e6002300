"""Real parts for the tests: the launcher, the sweep, a small text and a tokenizer of its own."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TINY = (
    "--hidden_dim 64 --num_layers 2 --num_heads 4 --vocab_size 512 --batch_size 2 --seq_length 32 --num_steps 6 "
    "--warmup_steps 2 --log_interval 2"
).split()


def run(*command, cwd=ROOT, timeout=1800, **environment):
    """Run a command to its end, with this interpreter's folder first on PATH. The first ones compile operators."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}
    command = [str(part) for part in command]
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)


def train(*options, **kwargs):
    """train.py as one process, without a launcher."""
    return run(sys.executable, ROOT / "train.py", *options, **kwargs)


@pytest.fixture(scope="session")
def text_and_tokenizer(tmp_path_factory):
    """A folder with a text file, and a folder with a word-level tokenizer of 70 entries that fits it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("text")
    words = [f"word{i}" for i in range(69)]
    lines = [" ".join(random.Random(i).choices(words, k=50)) for i in range(120)]
    (folder / "a.txt").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{w: i + 1 for i, w in enumerate(words)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer_folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tokenizer_folder)
    return folder, tokenizer_folder
