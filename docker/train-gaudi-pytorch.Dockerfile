# The training image for the Gaudi of today: the vendor's image of software 1.24.0 (PyTorch 2.10.0) and this
# project on top; its Open MPI and sshd are not used. The vendor's PyTorch and its bridge stay as they are; the build fails where they would not.
#   docker build --file docker/train-gaudi-pytorch.Dockerfile --tag gaudi-bert-train-gaudi-pytorch .
#   (or: make images IMAGES=train-gaudi-pytorch)
# For a driver of another release, BASE_IMAGE is the vendor's image of that release. It runs as root, as the vendor's software
# requires. Optional BuildKit secrets: ca_bundle, pip_conf (docker/pip-install.sh).
ARG BASE_IMAGE=vault.habana.ai/gaudi-docker/1.24.0/ubuntu22.04/habanalabs/pytorch-installer-2.10.0:latest

FROM ${BASE_IMAGE}
COPY docker/pip-install.sh /usr/local/bin/pip-install
COPY docker/requirements.py docker/vendor_packages.py /opt/gaudi-bert/
COPY constraints.txt pyproject.toml /opt/gaudi-bert/
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    python3 /opt/gaudi-bert/vendor_packages.py record pytorch /opt/gaudi-bert/vendor /opt/gaudi-bert/constraints.txt \
 && python3 /opt/gaudi-bert/requirements.py --extras serve,s3 --without torch,jinja2,matplotlib \
      >/opt/gaudi-bert/requirements.txt \
 && pip-install --no-cache-dir --constraint /opt/gaudi-bert/vendor/constraints.txt --requirement /opt/gaudi-bert/requirements.txt \
 && python3 /opt/gaudi-bert/vendor_packages.py check /opt/gaudi-bert/vendor
COPY . /opt/gaudi-bert/src
ENV NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+sse4.2,+pclmul NUMBA_CACHE_DIR=/opt/gaudi-bert/kernels
# Kernels are compiled here, for every processor that has AVX2, and not again by each container.
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    PIP_CONSTRAINT=/opt/gaudi-bert/constraints.txt pip-install --no-cache-dir --no-deps /opt/gaudi-bert/src \
 && rm -rf /opt/gaudi-bert/src/build \
 && python3 /opt/gaudi-bert/src/docker/compile_kernels.py records \
 && chmod -R a+rX $NUMBA_CACHE_DIR \
 && python3 /opt/gaudi-bert/vendor_packages.py check /opt/gaudi-bert/vendor
ARG VERSION=unknown
LABEL org.opencontainers.image.title="gaudi-bert-train-gaudi-pytorch" \
      org.opencontainers.image.description="Trains BERT on packed data by PyTorch, on Intel Gaudi" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
WORKDIR /work
ENTRYPOINT ["gaudi-bert"]
CMD ["--help"]
