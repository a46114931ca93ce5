"""The experiments on MATH: models of 1.5B, labelled by one of 7B, on a v5e-16 slice.

python scripts/experiment.py supervision --scale=full --output_dir=gs://BUCKET/experiments
"""
