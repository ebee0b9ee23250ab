# Workers, and the model's download. Build from the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile -t baton-worker:0.1.0 .
#   docker build -f deploy/docker/worker.Dockerfile --build-arg REQUIREMENTS=cuda -t baton-worker:0.1.0-cuda .
# The CUDA libraries are in torch's wheels; the driver is the node's.
FROM python:3.11-slim-bookworm AS build
ARG REQUIREMENTS=cpu
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps -r requirements/${REQUIREMENTS}.txt setuptools
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && ln -s "$(python -c 'from baton.models.embedded import embedded_model; print(embedded_model())')" /opt/venv/baton-tiny

FROM python:3.11-slim-bookworm
# Triton builds the launchers of its kernels with a C compiler
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /opt/baton && ln -s /opt/venv/baton-tiny /opt/baton/baton-tiny
USER 10001:10001
ENTRYPOINT []
CMD ["baton", "worker", "--help"]
