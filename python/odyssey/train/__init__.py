"""Training: `DistributedTrainer`, its session of epochs and steps, what it saves and resumes from.

| file | what it is |
|---|---|
| trainer.py, fit.py | the face; the loops over epochs and steps |
| session.py | what happens around steps, as events |
| state.py, resume.py | what a checkpoint holds of a training; going on from one |
| agreement.py, preflight.py | what ranks compare; what is looked at before the start |
| numerics.py | the policy for numbers that are not finite |
| asynchronous.py | trainings whose ranks do not take every step together |
| progress.py, requests.py | what is shown; what a running job can be asked for |

`python -m odyssey.train` is `odyssey train`.
"""
