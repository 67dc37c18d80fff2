"""The shapes in signatures: "batch" rows of "time" positions, "groups" of "G" responses, "N" of either."""

from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

Tokens = Int[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]
PerToken = Float[Tensor, "batch time"]
PerRow = Float[Tensor, "batch 1"]
Rows = Bool[Tensor, " batch"]
Scalar = Float[Tensor, ""]
Scores = dict[str, Float[Tensor, "batch time"]]

Logits = Float[Tensor, "N vocabulary"]
PerPosition = Float[Tensor, " N"]
Labels = Int[Tensor, " N"]

Rewards = Float64[Tensor, "groups G"]
PerGroup = Float64[Tensor, "groups #G"]
