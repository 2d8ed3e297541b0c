# A base image with the wheels of the context: of PyTorch for CPUs, where this machine has one; docker/install-torch.sh takes it.
ARG BASE_IMAGE=gaudi-bert-base:bookworm
FROM ${BASE_IMAGE}
COPY . /opt/torch-wheels/
