"""Row kernels in Triton, for float16, bfloat16 and float32 on a GPU. Importing a module here imports Triton."""
