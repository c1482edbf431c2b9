"""The hand-written loop for a GPT of 124 million parameters on one GPU: bf16 autocast, torch.compile, fused
AdamW, clipping.

Batches are gathered on the host, pinned and copied without waiting; the loss stays on the device, so that
nothing in the loop waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.train import models
from bench.train.turns import Block

SEED = 5
BATCH = 32
CONTEXT = 1024
SEQUENCES = 64 * BATCH
VOCABULARY = 50304
CLIP_NORM = 1.0


def tokens(sequences: int = SEQUENCES, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Random tokens and the ones that follow them."""
    drawn = torch.randint(VOCABULARY, (sequences, context + 1), generator=torch.Generator().manual_seed(SEED))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def model() -> nn.Module:
    torch.manual_seed(SEED)
    return models.gpt_124m()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def objective(gpt: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = gpt(*batch)
    return loss


def prepare(workers: int, *, batch: int = BATCH, deterministic: bool = False) -> Block:
    torch.set_float32_matmul_precision("high")
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda")
    gpt: Any = torch.compile(model().to(device))
    stepper = optimizer(gpt.parameters())
    inputs, targets = tokens()

    def draw() -> list[Tensor]:
        ids = torch.randint(len(inputs), (batch,))
        gathered = (part.index_select(0, ids).pin_memory() for part in (inputs, targets))
        return [part.to(device, non_blocking=True) for part in gathered]

    def block(warmup: int, steps: int) -> dict[str, Any]:
        total = torch.zeros((), device=device)
        started = 0.0
        for step in range(warmup + steps):
            if step == warmup:
                torch.cuda.synchronize()
                started = time.perf_counter()
            now = draw()
            stepper.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = gpt(*now)
            loss.backward()
            nn.utils.clip_grad_norm_(gpt.parameters(), CLIP_NORM)
            stepper.step()
            total += loss.detach()
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - started, "loss": total.item() / (warmup + steps)}

    return block
