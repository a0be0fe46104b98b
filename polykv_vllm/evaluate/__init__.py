# SPDX-License-Identifier: Apache-2.0
"""`polykv eval`: what a cache format costs in quality, measured on the real engine."""
