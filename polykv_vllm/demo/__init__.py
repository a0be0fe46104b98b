# SPDX-License-Identifier: Apache-2.0
"""`polykv demo`: eight agents on one compressed prefix, with the real server."""
