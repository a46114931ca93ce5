# A worker of a GKE cluster.  scripts/launch_tpu.sh builds it from one commit, on Cloud Build:
#   gcloud builds submit prm_jax-COMMIT.tar.gz --tag=REGION-docker.pkg.dev/PROJECT/REPOSITORY/prm_jax:COMMIT
# The user is root: TPU devices are opened by a privileged container, as XPK starts it.
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1
WORKDIR /app
COPY setup.py pyproject.toml README.md ./
COPY prm_jax prm_jax
RUN python -m pip install --no-cache-dir '.[tpu,tensorboard]'
COPY configs configs
COPY scripts scripts
