"""What a GPU does with this package: same texts, what cycles cost at the shapes of real models, how near that is to the
limit. ``python -m secondguess.bench.gpu``; without a GPU the same at tiny shapes on the CPU, which says nothing of one.
"""
