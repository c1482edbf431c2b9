"""Every example runs as its first lines say: alone, under mpirun, under `paceline run`, from files; those
that are ported from a plain script reach its figures."""

from __future__ import annotations

import gzip
import importlib
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACELINE = [sys.executable, "-m", "paceline"]


def run(*command: Any, folder: Path) -> str:
    """Run a command to its end in a folder of its own, and return what it printed."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, *given: Any, folder: Path) -> str:
    return run(sys.executable, EXAMPLES / name, *given, folder=folder)


def figure(text: str, name: str) -> float:
    found = re.search(rf"{name} ([\d.]+)", text)
    assert found, text
    return float(found.group(1))


@pytest.fixture(scope="module")
def mnist_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """scikit-learn's digits in the format of MNIST: what a reader of the standard files gets."""
    datasets = pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    digits = datasets.load_digits()
    pixels = (digits.images * 15.9).astype(np.uint8)
    folder, files = tmp_path_factory.mktemp("mnist"), []
    for name, part in (("train", slice(0, 1200)), ("t10k", slice(1200, 1600))):
        images, labels = pixels[part], digits.target[part].astype(np.uint8)
        files.append(folder / f"{name}-images-idx3-ubyte")
        files[-1].write_bytes(struct.pack(">I3I", 0x0803, *images.shape) + images.tobytes())
        header = struct.pack(">II", 0x0801, len(labels))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return files


@pytest.fixture(scope="module")
def cifar_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pieces of two photographs in the binary format of CIFAR-10."""
    pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    sys.path.insert(0, str(EXAMPLES))
    try:
        photographs = importlib.import_module("image_files").photographs
    finally:
        sys.path.remove(str(EXAMPLES))
    folder, files = tmp_path_factory.mktemp("cifar"), []
    for name, (pixels, labels) in zip(("data_batch_1.bin", "test_batch.bin"), photographs(), strict=True):
        planes = (pixels * 255).byte().flatten(1).numpy()
        files.append(folder / name)
        files[-1].write_bytes(np.concatenate([labels.byte().numpy()[:, None], planes], 1).tobytes())
    return files


def test_mnist_from_its_files(mnist_files, tmp_path):
    alone = example("mnist_basic.py", *mnist_files, "--epochs", 4, "--workers", 1, folder=tmp_path)
    assert figure(alone, "accuracy") > 0.85
    several = example("mnist_basic.py", *mnist_files, "--epochs", 4, "--workers", 2, folder=tmp_path)
    assert re.findall("weights ([0-9a-f]+)", several) == re.findall("weights ([0-9a-f]+)", alone)
    plain = example("mnist_basic.py", *mnist_files, "--epochs", 4, "--plain", folder=tmp_path)
    assert abs(figure(plain, "accuracy") - figure(alone, "accuracy")) < 0.06


def test_mnist_in_a_folder_of_images(mnist_files, tmp_path):
    """The labels' file is found by the name of the images' file alone; both may be compressed."""
    for file in mnist_files[0].parent.iterdir():
        compressed = tmp_path / "images" / f"{file.name}.gz"
        compressed.parent.mkdir(exist_ok=True)
        compressed.write_bytes(gzip.compress(file.read_bytes()))
    files = [tmp_path / "images" / f"{file.name}.gz" for file in mnist_files]
    assert (
        figure(example("mnist_basic.py", *files, "--epochs", 3, "--plain", folder=tmp_path), "accuracy") > 0.8
    )


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda data: data[:-5], "is not whole"),
        (lambda data: data[:9], "is not whole"),
        (lambda data: b"no IDX", "is no IDX file"),
        (lambda data: gzip.compress(data)[:-20], "cannot be decompressed"),
    ],
    ids=["short", "header", "other", "gzip"],
)
def test_a_damaged_file_is_named(damaged, said, mnist_files, tmp_path):
    file = tmp_path / mnist_files[0].name
    file.write_bytes(damaged(mnist_files[0].read_bytes()))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "mnist_basic.py"), str(file), str(mnist_files[1])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode != 0
    assert str(file) in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_cifar_from_its_files(cifar_files, tmp_path):
    mine = example("cifar10_advanced.py", *cifar_files, "--epochs", 3, folder=tmp_path)
    plain = example("cifar10_advanced.py", *cifar_files, "--epochs", 3, "--plain", folder=tmp_path)
    assert figure(mine, "accuracy") > figure(plain, "accuracy") - 0.05


@pytest.mark.parametrize("name", ["mnist_basic.py", "cifar10_advanced.py"])
def test_under_launchers(name, tmp_path):
    ran = run(*PACELINE, "run", "--nproc-per-node", 4, EXAMPLES / name, "--epochs", 1, folder=tmp_path)
    hashes = re.findall("weights ([0-9a-f]+)", ran)
    assert len(hashes) == 4
    assert len(set(hashes)) == 1
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4")
    ran = run(*mpirun, sys.executable, EXAMPLES / name, "--epochs", 1, folder=tmp_path)
    assert set(re.findall("weights ([0-9a-f]+)", ran)) == set(hashes)


@pytest.mark.parametrize(
    ("name", "given", "word", "margin"),
    [
        ("char_transformer.py", ["--steps", 120], "loss", 0.25),
        ("word_language_model.py", ["--epochs", 4], "perplexity", 5.0),
    ],
)
def test_language_models_reach_the_plain_loop(name, given, word, margin, tmp_path):
    mine = example(name, *given, folder=tmp_path)
    plain = example(name, *given, "--plain", folder=tmp_path)
    assert figure(mine, word) < figure(plain, word) + margin


def test_own_loop(tmp_path):
    assert figure(example("own_loop.py", folder=tmp_path), "accuracy") > 0.9


def test_gan(tmp_path):
    radius = figure(example("gan.py", "--steps", 300, folder=tmp_path), "radius")
    assert 0.5 < radius < 1.6


def test_resume_and_chaos(tmp_path):
    assert "the same bits" in example("resume_and_chaos.py", folder=tmp_path)


# DistributedDataParallel leaks references to its group, whose threads outlive the group then. Once, of some
# thirty starts, torch aborted a rank that had come to the end of its script. Here a rank ends with it.
ENDING_WITH_THE_SCRIPT = """
import os, runpy, sys

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


def test_a_script_of_torchrun_under_torchrun(tmp_path):
    ending = tmp_path / "ending.py"
    ending.write_text(ENDING_WITH_THE_SCRIPT)
    check_torchrun_script(
        tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, ending
    )


def test_a_script_of_torchrun_under_paceline(tmp_path):
    check_torchrun_script(tmp_path, *PACELINE, "run", "--nproc-per-node", 2)


def check_torchrun_script(folder: Path, *launcher: Any) -> None:
    text = run(*launcher, EXAMPLES / "torchrun_script.py", "--epochs", 1, folder=folder)
    # The last line of the script: both ranks came to its end.
    assert sorted(re.findall(r"rank (\d) of 2: accuracy", text)) == ["0", "1"]


@pytest.mark.parametrize("peer", ["lightning", "accelerate"])
def test_migrated_scripts_reach_the_same(peer, tmp_path):
    pytest.importorskip(peer, reason="make test-integrations installs it")
    after = figure(example(f"from_{peer}.py", folder=tmp_path), "accuracy")
    before = figure(example(f"from_{peer}.py", "--before", folder=tmp_path), "accuracy")
    assert after > 0.9
    assert abs(after - before) < 0.05


@pytest.mark.leaky("nbclient leaves its sockets to the kernel open")
def test_the_notebook_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    import nbformat

    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = str(notebook.cells[3].outputs[-1])
    assert "History(" in shown


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("mnist_basic.py", ["missing-images-idx3-ubyte", "x"], "No such file"),
        ("mnist_basic.py", ["only-one"], "or neither"),
        ("cifar10_advanced.py", [__file__, __file__], "no whole number of records"),
    ],
)
def test_wrong_files_are_named(name, given, said, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *given],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(300)
def test_tune_digits(tmp_path):
    pytest.importorskip("optuna", reason="pip install 'paceline[tune]'")
    first = example("tune_digits.py", "--trials", 6, "--parallel", 2, folder=tmp_path)
    assert figure(first, "accuracy") > 0.85
    more = example("tune_digits.py", "--trials", 8, "--parallel", 2, "--resume", folder=tmp_path)
    assert "8 trials" in more
    population = example("tune_digits.py", "--trials", 12, "--parallel", 2, "--population", folder=tmp_path)
    assert figure(population, "accuracy") > 0.85
