# Routers, hooks and tests of a release; no torch. Build from the repository's root:
#   docker build -f deploy/docker/router.Dockerfile -t baton-router:0.1.0 .
# Each package has the hash that `make locks` wrote; /opt/venv/sbom.cdx.json lists them.
# Debian's own Python comes without pip and takes less room than python.org's. A router reads a
# model's configuration and tokenizer, never its weights.
FROM debian:bookworm-slim AS python
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
WORKDIR /src
COPY requirements requirements
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.lock \
    && python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/sbom.lock \
    && python3 -m venv --without-pip /opt/venv
RUN /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps \
        --require-hashes -r requirements/router.lock \
    && find /opt/venv -type d -name tests -prune -exec rm -r {} +
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index \
        /wheels/*.whl \
    && find /opt/venv -name '*.safetensors' -delete \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON \
        --output-file /opt/venv/sbom.cdx.json /opt/venv/bin/python \
    && ln -s "$(/opt/venv/bin/python -c 'from baton.models.embedded import embedded_model; print(embedded_model())')" /opt/venv/baton-tiny

FROM python
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /opt/baton && ln -s /opt/venv/baton-tiny /opt/baton/baton-tiny
USER 10001:10001
ENTRYPOINT []
CMD ["baton", "router", "--help"]
