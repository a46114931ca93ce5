# A worker of a GKE cluster (docs/tpu.md).  Built from a commit by Cloud Build:
#   git archive --format=tar.gz --output=/tmp/prm_jax.tar.gz HEAD
#   gcloud builds submit /tmp/prm_jax.tar.gz --tag=REGION-docker.pkg.dev/PROJECT/images/prm_jax:TAG
# The user is root: TPU devices are opened by a privileged container, as XPK starts it.
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1
WORKDIR /app
COPY setup.py pyproject.toml README.md ./
COPY configs configs
COPY scripts scripts
COPY prm_jax prm_jax
RUN python -m pip install --no-cache-dir '.[tpu,tensorboard]'
