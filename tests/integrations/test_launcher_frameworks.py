"""Scripts of Accelerate, Lightning and the Hugging Face Trainer under `paceline run`, unchanged: they find
their ranks by torchrun's variables. Tiny models, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.frontends.launcher.launched import launched, write

ACCELERATE = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    weight = accelerator.unwrap_model(model).weight.sum().item()
    print("done", accelerator.num_processes, accelerator.process_index, round(weight, 6))
    accelerator.end_training()
"""

LIGHTNING = """
    import sys
    import torch
    import lightning

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            x, y = batch
            return torch.nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=sys.argv[1],
    )
    model = Small()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    print("done", trainer.world_size, trainer.global_rank, round(model.net.weight.sum().item(), 6))
"""

HUGGING_FACE = """
    import sys
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return {"input_ids": torch.tensor([1, index % 8, 2]), "labels": torch.tensor(index % 2)}

    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = BertForSequenceClassification(BertConfig(intermediate_size=8, **sizes))
    arguments = TrainingArguments(
        output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Data())
    trainer.train()
    weight = round(sum(p.sum().item() for p in model.parameters()), 5)
    print("done", arguments.world_size, arguments.process_index, weight)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "source"),
    [("accelerate", ACCELERATE), ("lightning", LIGHTNING), ("transformers", HUGGING_FACE)],
)
def test_a_script_of_another_framework_runs_as_under_torchrun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], package: str, source: str
) -> None:
    pytest.importorskip(package)
    done = launched(
        capfd,
        write(tmp_path, source),
        tmp_path / "out",
        nproc_per_node=2,
        max_restarts=0,
        start_timeout=200.0,
    )
    assert done.code == 0, done.err
    ends = []
    for rank in range(2):
        (line,) = [line for line in done.of(rank) if line.startswith("done 2 ")]
        words = line.split()
        assert words[2] == str(rank)
        ends.append(words[3:])
    # Gradients were averaged: both have the same weights.
    assert ends[0] == ends[1]
