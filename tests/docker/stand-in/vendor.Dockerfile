# A stand-in for the vendor's TensorFlow image: packages of the right names and versions that do nothing.
ARG BASE_IMAGE=debian:12.11-slim
FROM ${BASE_IMAGE}
ENV PATH=/opt/vendor/bin:$PATH
COPY make_wheels.py /opt/
RUN --mount=type=secret,id=ca_bundle \
    python3 -m venv /opt/vendor \
 && python3 /opt/make_wheels.py /opt/wheels tensorflow \
 && if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi \
 && python3 -m pip install --quiet --no-cache-dir --find-links /opt/wheels \
      numpy==1.24.4 tensorflow-cpu==2.15.0 habana-tensorflow==1.14.0.493 habana-horovod==1.14.0.493
