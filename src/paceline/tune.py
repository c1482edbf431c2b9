"""`paceline.tune`: search spaces for `DistributedTuner`, and what a trial says and asks.

space = {"lr": paceline.tune.loguniform(1e-4, 1e-1), "layers": paceline.tune.randint(1, 5)}
paceline.tune.report(epoch, accuracy)
"""

from paceline.frontends.tuner.current_trial import (
    TrialPruned as TrialPruned,
    folder as folder,
    params as params,
    parent_folder as parent_folder,
    report as report,
)
from paceline.frontends.tuner.population_settings import PopulationTraining as PopulationTraining
from paceline.frontends.tuner.search_space import (
    choice as choice,
    loguniform as loguniform,
    randint as randint,
    uniform as uniform,
)
