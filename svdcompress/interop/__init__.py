"""Integrations with other training frameworks, one file each, imported only when named: `svdcompress.interop.lightning`."""
