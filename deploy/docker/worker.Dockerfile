# Workers, and the model's download. Build from the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile -t baton-worker:0.1.0 .
#   docker build -f deploy/docker/worker.Dockerfile --build-arg REQUIREMENTS=cuda -t baton-worker:0.1.0-cuda .
# Each package has the hash that `make locks` wrote; /opt/venv/sbom.cdx.json lists them. torch's CPU
# build comes from its own index. The CUDA libraries are packages of their own; the driver is the
# node's.
FROM python:3.11-slim-bookworm AS build
ARG REQUIREMENTS=cpu
WORKDIR /src
COPY requirements requirements
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.lock \
    && python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/sbom.lock \
    && python3 -m venv --without-pip /opt/venv
RUN /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps \
        --require-hashes --extra-index-url https://download.pytorch.org/whl/cpu \
        -r requirements/${REQUIREMENTS}.lock
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index \
        /wheels/*.whl \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON \
        --output-file /opt/venv/sbom.cdx.json /opt/venv/bin/python \
    && ln -s "$(/opt/venv/bin/python -c 'from baton.models.embedded import embedded_model; print(embedded_model())')" /opt/venv/baton-tiny

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
