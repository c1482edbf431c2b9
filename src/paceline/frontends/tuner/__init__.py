"""The front door for hyperparameter search: `DistributedTuner`, `paceline.tune` and `paceline tune`.

    distributed_tuner.py   DistributedTuner: what a user sets, and what a search leaves
    search_space.py        choice, uniform, loguniform, randint; lists, Optuna's and Ray Tune's objects
    space_file.py          a search space in a TOML file
    search_loop.py         one search: asks for trials, starts them, records how each ended
    trial_schedule.py      decides which trial comes next (pure)
    trial_engine.py        where trials run: the protocol of local_trials.py and ray_trials.py
    trial_process.py       a trial's process: calls the user's function, reports, leaves
    trial_on_ray.py        the same in a worker of Ray
    current_trial.py       the trial that this process is: `paceline.tune.report`
    tuning_study.py        the study, kept by Optuna: asked, reported, finished
    study_log.py           its file, in the format of Optuna's journal storage; a trial's end is one write
    sampler_choice.py      samplers and pruners by name; sampler_state.py: their generators, for a resume
    population.py          population-based training, as a sampler
    trial_table.py         trials as a table and as a picture

Only the modules that keep the study import Optuna, and a trial's process imports none of them.
"""
