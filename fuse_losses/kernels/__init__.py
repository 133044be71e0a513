"""Row kernels: what happens to one chunk of logits. Imports torch only; Triton is imported by
`kernels.triton` alone.
"""
