# A stand-in for the vendor's PyTorch image: PyTorch for CPUs, Open MPI in a folder of its own, and a bridge of the right name that
# finds no card. The context holds docker/, constraints.txt and make_wheels.py.
ARG BASE_IMAGE=gaudi-bert-base:wheels
FROM ${BASE_IMAGE}
ARG DEBIAN_FRONTEND=noninteractive
ENV PATH=/opt/vendor/bin:$PATH
RUN apt-get update \
 && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server \
 && rm -rf /var/lib/apt/lists/*
COPY docker/pip-install.sh /usr/local/bin/pip-install
COPY docker/install-torch.sh /usr/local/bin/install-torch
COPY make_wheels.py constraints.txt /opt/
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    python3 -m venv /opt/vendor \
 && install-torch /opt/constraints.txt \
 && python3 /opt/make_wheels.py /opt/more-wheels pytorch \
 && pip-install --no-cache-dir --constraint /opt/constraints.txt numpy \
 && pip-install --no-deps /opt/more-wheels/habana_torch_plugin-*.whl
