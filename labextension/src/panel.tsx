import { refreshIcon, VDomRenderer } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import { instantText, problemText, staleText } from './format';
import { servicePageHref } from './links';
import { OtherSessions } from './othersessions';
import { ExternalLink, type IContext, type IStatusProps, Section } from './parts';
import { Queue } from './queue';
import { Resources } from './resources';
import { ThisSession } from './thissession';
import type { Banner as IBanner } from './service';
import type { IFGPUModel } from './tokens';

/** The side panel: this session, the user's other sessions, what they hold of what there is, the queue. */
export class FGPUPanel extends VDomRenderer<IFGPUModel> {
  constructor(
    model: IFGPUModel,
    private readonly _context: IContext
  ) {
    super(model);
    this.addClass('jp-fgpu-Panel');
  }

  protected render(): JSX.Element {
    const { trans, actions } = this._context;
    const { reading } = this.model;
    const wrong = problemText(reading, trans);
    const stale = staleText(reading, Date.now(), trans);
    return (
      <>
        <header>
          <h2>{trans.__('GPU share')}</h2>
          <button
            type="button"
            className="jp-fgpu-IconButton"
            title={trans.__('Refresh')}
            aria-label={trans.__('Refresh the GPU share')}
            onClick={actions.refresh}
          >
            <refreshIcon.react tag="span" width="16px" height="16px" />
          </button>
        </header>
        {/* Always present, so that screen readers announce what appears in it. */}
        <div role="status">
          {wrong !== null && <p className="jp-fgpu-Problem">{wrong}</p>}
          {reading.status?.banner && (
            <Banner banner={reading.status.banner} context={this._context} />
          )}
        </div>
        {/* Not in there: it would be announced again with each second that it counts. */}
        {stale !== null && <p className="jp-fgpu-Problem">{stale}</p>}
        {reading.server === 'loading' && <p>{trans.__('Loading…')}</p>}
        {reading.server !== 'missing' && reading.status !== null && (
          <StatusView status={reading.status} context={this._context} />
        )}
      </>
    );
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.model.watchDetails(true);
  }

  protected onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.model.watchDetails(false);
  }
}

/** What the administrator tells all. */
function Banner({ banner, context }: { banner: IBanner; context: IContext }): JSX.Element {
  const { trans } = context;
  return (
    <p
      className={`jp-fgpu-Banner${banner.level === 'warning' ? ' jp-fgpu-mod-warning' : ''}`}
    >
      <strong>
        {banner.level === 'warning'
          ? trans.__('Warning from your administrator:')
          : trans.__('From your administrator:')}
      </strong>{' '}
      {banner.text}
      {banner.until_at_s !== null && (
        <span className="jp-fgpu-Minor">
          {' '}
          {trans.__('(until %1)', instantText(banner.until_at_s, Date.now()))}
        </span>
      )}
    </p>
  );
}

function StatusView({ status, context }: IStatusProps): JSX.Element | null {
  const { trans, hub } = context;
  if (status.hub === 'absent' && status.session === null) {
    return null;
  }
  const known = status.as_of_s !== null;
  return (
    <>
      <ThisSession status={status} context={context} />
      {known && <OtherSessions status={status} context={context} />}
      {known && <Resources status={status} context={context} />}
      {status.hub !== 'absent' && (
        <Section title={trans.__('Queue')}>
          {known && <Queue status={status} context={context} />}
          <ExternalLink href={servicePageHref(hub)}>
            {trans.__('Your sessions and the GPUs')}
          </ExternalLink>
        </Section>
      )}
    </>
  );
}
