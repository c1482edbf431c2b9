"""The front door for users of DistributedDataParallel: settings per GPU, and a trainer.

    distributed_config.py   DistributedConfig: settings that count per GPU, and what they mean globally
    ddp_trainer.py          PyTorchDDPTrainer: translates to TrainConfig and Trainer
    settings_in_words.py    what the settings mean for the whole run, said once

Must not train: what a worker does is in train/, how a run is carried out in frontends/fit_drivers.py.
"""
