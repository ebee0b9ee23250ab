# Routers, hooks and tests of a release; no torch. Build from the repository's root:
#   docker build -f deploy/docker/router.Dockerfile -t baton-router:0.1.0 .
FROM python:3.11-slim-bookworm AS build
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY requirements/cpu.txt requirements/cpu.txt
COPY . .
RUN pip install --no-cache-dir --constraint requirements/cpu.txt '.[redis]' \
    && ln -s "$(python -c 'from baton.models.embedded import embedded_model; print(embedded_model())')" /opt/venv/baton-tiny

FROM python:3.11-slim-bookworm
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /opt/baton && ln -s /opt/venv/baton-tiny /opt/baton/baton-tiny
USER 10001:10001
ENTRYPOINT []
CMD ["baton", "router", "--help"]
