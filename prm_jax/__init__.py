"""Process reward models on JAX/TPU.

Dimension letters in docstrings and einsums, unless they say otherwise:

  B rows of a batch     T tokens of a row      R read positions of a row   D model width
  N attention heads     K key/value heads      H head size                 G = N / K
  F feed-forward width  V vocabulary           L layers                    C label classes
  P problems            M candidates of a problem   S solutions (or steps, where said)

K also counts the class heads of an ensemble, in `[B, R, K, C]`, and the values of N, in `[P, K]`.
"""

__version__ = "0.1.0"
