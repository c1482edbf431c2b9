# An image for `paceline submit --engine kubernetes` and `paceline train --engine kubernetes`: Paceline, torch for
# the CPU, and the scripts in the folder `examples` of the build context: name your own in `COPY examples /app`.
#
#   docker build -t REGISTRY/train:1 .
#   docker build -t REGISTRY/train:1 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .     for GPUs
#
# Runs as an ordinary user on a read-only root file system; /tmp and the run's folder are all that it writes to.
# tests/clusters/kubernetes/test_dockerfile.py carries these instructions out without a container engine.
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HOME=/tmp
RUN python3 -c "import torch" 2>/dev/null || python3 -m pip install --index-url ${TORCH_INDEX} "torch>=2.11"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN python3 -m pip install /src && rm -rf /src/*
WORKDIR /app
COPY examples /app
USER 1000:1000
ENTRYPOINT ["python3", "-m", "paceline"]
CMD ["--help"]
