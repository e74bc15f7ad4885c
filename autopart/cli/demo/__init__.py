"""What `autopart demo` runs, and the small models that the command line knows by name.

models.py   built-in models: random weights and a batch        text.py   bytes of the standard library as a data set
train.py    a training run over ranks, and in one process      tour.py   the demo: run both, compare, report
"""
