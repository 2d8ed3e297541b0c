# The training image for CPUs, by one of two engines: train and evaluate, alone or with others. TensorFlow's processes have Open
# MPI, and sshd for an MPIJob; PyTorch's start and meet without either.
#   docker build --file docker/train-cpu.Dockerfile --tag gaudi-bert-train-cpu .        (or: make images)
#   docker build --file docker/train-cpu.Dockerfile --build-arg ENGINE=pytorch --tag gaudi-bert-train-cpu-pytorch .
#                                                                    (or: make images IMAGES=train-cpu-pytorch)
# BASE_IMAGE is any Debian 12 or Ubuntu 22.04. Optional BuildKit secrets: ca_bundle, pip_conf (docker/pip-install.sh).
ARG BASE_IMAGE=debian:12.11-slim
# tensorflow or pytorch
ARG ENGINE=tensorflow

FROM ${BASE_IMAGE} AS base-pytorch
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
ENV PATH=/opt/venv/bin:$PATH

# Host keys of sshd are made by each container when it starts: no image holds any.
FROM base-pytorch AS base-tensorflow
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /etc/ssh/ssh_host_* \
 && mkdir -p /run/sshd

# One of the two stages above, not an image.
# hadolint ignore=DL3006
FROM base-${ENGINE} AS base

FROM base AS requirements
ARG ENGINE
COPY docker/requirements.py pyproject.toml /src/
# PyTorch also serves models.
RUN if [ "$ENGINE" = pytorch ]; then extras=serve; else extras=tensorflow; fi \
 && python3 /src/requirements.py --extras "$extras,s3" --without jinja2,matplotlib >/requirements.txt

FROM base AS empty
RUN python3 -m venv /opt/venv
COPY docker/pip-install.sh /usr/local/bin/pip-install
COPY constraints.txt /
COPY --from=requirements /requirements.txt /

FROM empty AS pytorch
COPY docker/install-torch.sh /usr/local/bin/install-torch
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=cache,target=/root/.cache/pip \
    install-torch /constraints.txt \
 && pip-install --constraint /constraints.txt --requirement /requirements.txt

FROM empty AS tensorflow
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libopenmpi-dev make python3-dev \
 && rm -rf /var/lib/apt/lists/*
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=cache,target=/root/.cache/pip \
    pip-install --constraint /constraints.txt --requirement /requirements.txt
# Horovod has no wheels: it is built against this TensorFlow, by the last setuptools that it works with.
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=cache,target=/root/.cache/pip \
    pip-install --target /horovod-build setuptools==69.5.1 wheel==0.45.1 cmake==3.31.10 \
 && PYTHONPATH=/horovod-build PATH=/horovod-build/bin:$PATH \
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    PIP_USE_PEP517=0 pip-install --constraint /constraints.txt --no-build-isolation horovod \
 && rm -rf /horovod-build

FROM ${ENGINE} AS build
COPY . /src
WORKDIR /src
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT=/constraints.txt pip-install --no-deps .
# Kernels are compiled here, for every processor that has AVX2, and not again by each container.
ENV NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+sse4.2,+pclmul NUMBA_CACHE_DIR=/opt/venv/kernels
WORKDIR /tmp
RUN python3 /src/docker/compile_kernels.py records \
 && chmod -R a+rX $NUMBA_CACHE_DIR \
 && find /opt/venv -type d -name tests -prune -exec rm -rf {} + \
 && python3 -m pip uninstall --quiet --yes pip

FROM base
ARG ENGINE
ARG VERSION=unknown
LABEL org.opencontainers.image.title="gaudi-bert-train-cpu" \
      org.opencontainers.image.description="Trains BERT on packed data, on CPUs, by ${ENGINE}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN useradd --uid 1000 --no-create-home --home-dir /tmp gaudi-bert \
 && install -d -o gaudi-bert -g gaudi-bert /work
COPY --from=build /opt/venv /opt/venv
ENV HOME=/tmp NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+sse4.2,+pclmul NUMBA_CACHE_DIR=/opt/venv/kernels
# An MPIJob's sshd is this user's, too: it lets in nobody else.
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["gaudi-bert"]
CMD ["--help"]
