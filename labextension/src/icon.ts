import { LabIcon } from '@jupyterlab/ui-components';

/** A chip with one quarter of its face filled. */
const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <path fill-rule="evenodd" d="M6 4h12a2 2 0 0 1 2 2v12a2 2 0 0 1-2 2H6a2 2 0 0 1-2-2V6a2 2 0 0 1 2-2zm0 2v12h12V6z"/>
    <path d="M12 7.5h4.5V12H12z"/>
    <path d="M8 1h1.6v3H8zM14.4 1H16v3h-1.6zM8 20h1.6v3H8zM14.4 20H16v3h-1.6zM1 8h3v1.6H1zM1 14.4h3V16H1zM20 8h3v1.6h-3zM20 14.4h3V16h-3z"/>
  </g>
</svg>`;

export const sliceIcon = new LabIcon({
  name: 'jupyterlab-fgpu:slice',
  svgstr: SVG
});
