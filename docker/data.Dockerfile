# The data image: every stage but train and evaluate, and the runner for Kubernetes. It has no TensorFlow.
#   docker build --file docker/data.Dockerfile --tag gaudi-bert-data .        (or: make images)
# BASE_IMAGE is any Debian 12 or Ubuntu 22.04. Optional BuildKit secrets: ca_bundle, pip_conf (docker/pip-install.sh).
ARG BASE_IMAGE=debian:12.11-slim

FROM ${BASE_IMAGE} AS base
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
ENV PATH=/opt/venv/bin:$PATH

FROM base AS requirements
COPY docker/requirements.py pyproject.toml /src/
RUN python3 /src/requirements.py --extras hdf5,kubernetes,parquet,report,s3,text >/requirements.txt

FROM base AS build
RUN python3 -m venv /opt/venv
COPY docker/pip-install.sh /usr/local/bin/pip-install
COPY constraints.txt /
COPY --from=requirements /requirements.txt /
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=cache,target=/root/.cache/pip \
    pip-install --constraint /constraints.txt --requirement /requirements.txt
COPY . /src
WORKDIR /src
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT=/constraints.txt pip-install --no-deps .
# Kernels are compiled here, for every processor that has AVX2, and not again by each container.
ENV NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+sse4.2,+pclmul NUMBA_CACHE_DIR=/opt/venv/kernels
WORKDIR /tmp
RUN python3 /src/docker/compile_kernels.py \
 && chmod -R a+rX $NUMBA_CACHE_DIR \
 && find /opt/venv -type d -name tests -prune -exec rm -rf {} + \
 && python3 -m pip uninstall --quiet --yes setuptools pip

FROM base
ARG VERSION=unknown
LABEL org.opencontainers.image.title="gaudi-bert-data" \
      org.opencontainers.image.description="Packs BERT pretraining data and proves the packing" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN useradd --uid 1000 --no-create-home --home-dir /tmp gaudi-bert \
 && install -d -o gaudi-bert -g gaudi-bert /work
COPY --from=build /opt /opt
ENV HOME=/tmp NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+sse4.2,+pclmul NUMBA_CACHE_DIR=/opt/venv/kernels
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["gaudi-bert"]
CMD ["--help"]
