"""Every way to train, under random failures: the final weights must be the bits of one undisturbed process.

    python -m paceline.testing.gauntlet --runs 2000 --jobs 2      all features, seeded
    python -m paceline.testing.gauntlet --feature sparse --seed 17 --times 20      replay one plan

    features        the ways to train, one line each; a new one joins by `add(...)`
    plans           a seed becomes failures: kills, double kills, kills inside joins and state transfers,
                    short stops, requests to leave, changes of size, a killed supervisor, stop and resume
    outside_faults  injects the failures that come from outside of the workers into their real processes
    attempt         one run: disturb it, compare weights, losses and audit with the undisturbed run
    stepwise_way    the processes of the step-by-step manager, which nothing replaces (stepwise_ranks)
    runner          many runs in parallel processes, and the table that is printed

A plan is a function of the feature and the seed alone. Failures that the workers inject into themselves are
placed at a rank, a step, a phase and a delay within the phase; those from outside at a moment. A replayed
plan meets the same steps, not always the same instruction: repeat it with --times.
"""
