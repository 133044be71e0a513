"""The scalar language that pages are written in, on torch tensors; `kernels.triton.scalar` has it for Triton."""

import torch

exp = torch.exp
log = torch.log
log1p = torch.log1p
expm1 = torch.expm1
abs = torch.abs
where = torch.where
